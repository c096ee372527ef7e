# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point. :mod:`vllm_steer.compat.stages` lists the methods that it wraps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_steer.compat.stages import STARTUP, checks_without_steering, front_end_joins
from vllm_steer.compat.version import check_settings, check_version, is_tested
from vllm_steer.compat.wraps import install
from vllm_steer.log import steering_logger
from vllm_steer.plugin.user_hooks import check_user_hooks

logger = steering_logger(__name__)


def register() -> None:
    """Wrap ``EngineArgs``. vLLM calls this in each of its processes (entry point ``vllm.general_plugins``)."""
    install(STARTUP)


def engine_config(original: Callable[..., Any], engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``EngineArgs.create_engine_config``, which only front ends call, and prepare this process for steering.

    Raises:
        IncompatibleError: Steering is enabled, and the version or the settings of vLLM do not support it.
    """
    import vllm

    from vllm_steer.compat.internals import AsyncEngineArgs
    from vllm_steer.config import choose_executor, from_vllm_config

    asynchronous = isinstance(engine_args, AsyncEngineArgs)
    enabled = from_vllm_config(engine_args) is not None
    if enabled:
        check = check_version()
        if check is not None:
            logger.warning("%s. Run it with care; `vllm-steer doctor` proves a model.", check)
        from vllm_steer.taps.fusion_pass import install_fusion_pass

    vllm_config = original(engine_args, *args, **kwargs)
    if enabled:
        check_settings(vllm_config)
        check_user_hooks(vllm_config, asynchronous=asynchronous)
        choose_executor(vllm_config)
        install_fusion_pass(vllm_config)
        wrap_front_end()
    elif is_tested(vllm.__version__):
        install(checks_without_steering(serves=asynchronous), replace=False)
    return vllm_config


def wrap_front_end() -> None:
    """Wrap the methods of vLLM's front end and extend its outputs, for an engine with steering.

    Engine and worker processes never call this.
    """
    from vllm_steer.plugin.front_end import extend_outputs

    install(front_end_joins())
    extend_outputs()
