# SPDX-License-Identifier: Apache-2.0
"""Build a model on the meta device, from its configuration only, and report what an engine would serve.

``python -m vllm_steer.models.dry_run`` reads a JSON object from standard input, with ``model`` (a local folder with
``config.json``), ``steering`` (fields of :class:`~vllm_steer.config.SteeringConfig`) and ``engine`` (arguments of
``EngineArgs``). It prints the facts in the form in which a worker reports them. It runs in its own process because vLLM
initialises process-wide state to build a model.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = "vllm_steer.dry_run: "
"""Prefix of the line with the answer: vLLM prints to standard output as well."""


def dry_run(model: str, steering: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts.

    ``problem`` is the reason if the model cannot be served. ``examined`` is False if the reason is vLLM's, which may
    lack the kernels or packages for the model on this machine only.
    """
    import vllm

    from vllm_steer.config import SteeringConfig
    from vllm_steer.errors import IncompatibleError, SteeringError
    from vllm_steer.models.discovery import UnsupportedModelError

    facts: dict[str, Any] = {"vllm": vllm.__version__, "architecture": None, "conflicts": []}
    try:
        facts["architecture"] = next(iter(architectures_of(model)), None)
        _fill(facts, model, SteeringConfig.parse(dict(steering)), engine)
    except (IncompatibleError, SteeringError, UnsupportedModelError) as error:
        facts["problem"] = _reason(error)
    except Exception as error:
        # Anything that vLLM raises here would also stop an engine on this machine from starting.
        facts["problem"], facts["examined"] = _reason(error), False
    return facts


def _reason(error: Exception) -> str:
    """Return the message of an error on one line, without the values that pydantic adds to its own."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
    return " ".join(str(error).split()) or type(error).__name__


def _fill(facts: dict[str, Any], model: str, config: Any, engine: Mapping[str, Any]) -> None:
    from vllm_steer.compat.internals import EngineArgs
    from vllm_steer.compat.version import CONFLICTS
    from vllm_steer.models.centring import centring_of
    from vllm_steer.models.discovery import find_decoder
    from vllm_steer.models.sae import check_encoder, encoder_bytes
    from vllm_steer.models.sae_site import check_model, models_of
    from vllm_steer.points import points_on
    from vllm_steer.request.readout import SAE_PREFIX
    from vllm_steer.taps.tables import table_bytes, table_shapes

    import_architecture(model)
    arguments = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        load_format="dummy",
        # Quantisation does not affect where the stream is, and not every machine supports every format.
        hf_overrides=_unquantised,
        **engine,
    )
    vllm_config = arguments.create_engine_config()
    model_config = vllm_config.model_config
    facts["architecture"] = model_config.architectures[0]
    facts["conflicts"] = [conflict.setting for conflict in CONFLICTS if conflict.present(vllm_config)]
    facts["hidden_size"] = model_config.get_hidden_size()
    facts["max_model_len"] = model_config.max_model_len
    facts["dtype"] = str(model_config.dtype).removeprefix("torch.")
    if (tables := getattr(vllm_config, "engram_config", None)) is not None:
        # vLLM would allocate them in the host's memory, whichever device the model is built on.
        tables.cpu_offload = tables.dp_shared_memory = tables.use_thp = False
    module = _build_on_meta(vllm_config)
    facts["model_class"] = type(module).__name__
    decoder = find_decoder(module, model_config.hf_text_config, allow_unproven=config.allow_unproven)
    # The model is built for a single rank.
    facts["refused"], facts["unread"] = decoder.refused(tensor_parallel=False), decoder.unread(tensor_parallel=False)
    facts["recipes"] = decoder.recipes()
    facts["unproven"] = list(decoder.unproven)
    facts["num_layers"] = decoder.num_layers
    shapes = table_shapes(
        config,
        num_sites=facts["num_layers"] * len(points_on(config.points)),
        hidden_size=facts["hidden_size"],
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        max_requests=vllm_config.scheduler_config.max_num_seqs + 1,
        dtype=model_config.dtype,
    )
    facts["tables"] = table_bytes(shapes)
    for name, folder in config.saes.items():
        field = f"steering_config.saes.{name}"
        shape = check_encoder(folder, field, facts["hidden_size"], centring_of(decoder))
        if not config.sae_any_site:
            check_model(folder, field, models_of(model_config))
        facts["tables"][SAE_PREFIX + name] = encoder_bytes(shape)


def import_architecture(model: str) -> None:
    """Register the classes of a model's architectures; vLLM starts a process to inspect classes known only by name."""
    from vllm_steer.compat.internals import ModelRegistry

    for name in architectures_of(model):
        known = ModelRegistry.models.get(name)
        if known is None:
            continue
        try:
            ModelRegistry.register_model(name, known.load_model_cls())
        except ImportError as error:
            raise RuntimeError(f"vLLM cannot load {name} in this environment: {error}") from None


def architectures_of(model: str) -> list[str]:
    """Return the architectures that the model's ``config.json`` names."""
    return json.loads((Path(model) / "config.json").read_text()).get("architectures") or []


def _unquantised(hf_config: Any) -> Any:
    for config in (hf_config, hf_config.get_text_config()):
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
    return hf_config


def _build_on_meta(vllm_config: Any) -> Any:
    import torch

    from vllm_steer.compat.internals import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        initialize_model,
        set_current_vllm_config,
        set_default_torch_dtype,
    )

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"file://{Path(folder) / 'store'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        dtype = set_default_torch_dtype(vllm_config.model_config.dtype)
        with dtype, torch.device("meta"), _numbers_of_meta_tensors():
            return initialize_model(vllm_config)


def _numbers_of_meta_tensors() -> Any:
    """Return a context in which models can read numbers that they compute while they are built.

    ``torch.tensor(number)`` makes a tensor with a value, and ``tolist`` of a tensor without data, such as the slopes of
    ALiBi, returns zeros: the dry run does not depend on them.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class NumbersOfMetaTensors(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is torch.tensor and args and isinstance(args[0], (int, float)):
                kwargs = {"device": "cpu", **kwargs}
            if function is torch.Tensor.tolist and args[0].is_meta:
                return torch.zeros_like(args[0], device="cpu").tolist()
            return function(*args, **kwargs)

    return NumbersOfMetaTensors()


def main() -> None:
    request = json.load(sys.stdin)
    print(MARK + json.dumps(dry_run(request["model"], request["steering"], request["engine"])))


if __name__ == "__main__":
    main()
