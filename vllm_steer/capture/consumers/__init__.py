# SPDX-License-Identifier: Apache-2.0
"""Where captured rows go: the contract, the built-in consumers, and how others are found."""

from vllm_steer.capture.consumers.base import THREAD_PREFIX, Consumer
from vllm_steer.capture.consumers.discovery import (
    BUILT_IN,
    GROUP,
    consumer_class,
    consumer_names,
    make_consumer,
    parse_consumer_flag,
)

__all__ = [
    "BUILT_IN",
    "GROUP",
    "THREAD_PREFIX",
    "Consumer",
    "consumer_class",
    "consumer_names",
    "make_consumer",
    "parse_consumer_flag",
]
