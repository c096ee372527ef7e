# SPDX-License-Identifier: Apache-2.0
"""Consumers of captured rows: the interface, the built-in consumers, and those of installed packages."""

from vllm_steer.capture.consumers.base import THREAD_PREFIX, Consumer
from vllm_steer.capture.consumers.discovery import (
    BUILT_IN,
    ENTRY_POINT_GROUP,
    consumer_class,
    consumer_names,
    how_to_add,
    make_consumer,
    parse_consumer_flag,
    read_consumers,
)

__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "THREAD_PREFIX",
    "Consumer",
    "consumer_class",
    "consumer_names",
    "how_to_add",
    "make_consumer",
    "parse_consumer_flag",
    "read_consumers",
]
