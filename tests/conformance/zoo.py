# SPDX-License-Identifier: Apache-2.0
"""Architectures of the conformance tests that HF Transformers has: one row each, stating only its exceptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.conformance.model import TinyModel
from tests.conformance.zoo_backend import BACKEND
from tests.conformance.zoo_hybrids import HYBRIDS
from tests.conformance.zoo_native import NATIVE
from tests.conformance.zoo_settings import SETTINGS
from tests.conformance.zoo_wrappers import WRAPPERS

ZOO: Final[tuple[TinyModel, ...]] = (*NATIVE, *HYBRIDS, *BACKEND, *WRAPPERS, *SETTINGS)
BY_NAME: Final[Mapping[str, TinyModel]] = {tiny.name: tiny for tiny in ZOO}
