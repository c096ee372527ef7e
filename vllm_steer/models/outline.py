# SPDX-License-Identifier: Apache-2.0
"""A model without its weights: its modules on the meta device, from its configuration alone.

``python -m vllm_steer.models.outline`` reads a JSON object with ``model`` (a local folder with ``config.json``),
``steering`` (a :class:`~vllm_steer.config.SteeringConfig`) and ``engine`` (arguments of ``EngineArgs``) from standard
input, and prints the facts in which a worker reports what it serves. It is a process of its own, since vLLM can build a
model in a process that is set up for it only.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = "vllm_steer.outline: "
"""Stands ahead of the answer: vLLM and others print to standard output too."""


def outline(model: str, steering: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """The facts; ``problem`` says why the model cannot be served, where it cannot."""
    import vllm

    from vllm_steer.config import SteeringConfig

    facts: dict[str, Any] = {"vllm": vllm.__version__, "architecture": None, "conflicts": []}
    try:
        facts["architecture"] = next(iter(architectures_of(model)), None)
        _fill(facts, model, SteeringConfig.parse(dict(steering)), engine)
    except Exception as error:
        # Whatever vLLM raises on the way to the model is what a user would see at start, and is the answer here.
        facts["problem"] = " ".join(str(error).split()) or type(error).__name__
    return facts


def _fill(facts: dict[str, Any], model: str, config: Any, engine: Mapping[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_steer.compat.version import CONFLICTS
    from vllm_steer.models.discovery import find_decoder
    from vllm_steer.points import points_on
    from vllm_steer.taps.tables import table_bytes, table_shapes

    import_architecture(model)
    arguments = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        load_format="dummy",
        # What is quantised plays no part in where the stream is, and not every machine can hold every format.
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
    module = _on_meta(vllm_config)
    facts["model_class"] = type(module).__name__
    decoder = find_decoder(module, model_config.hf_text_config, allow_unproven=config.allow_unproven)
    # An outline has one rank.
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


def import_architecture(model: str) -> None:
    """Hand vLLM the class that a model names: to look at one that it knows by name only, it starts a process."""
    from vllm import ModelRegistry

    for name in architectures_of(model):
        known = ModelRegistry.models.get(name)
        if known is None:
            continue
        try:
            ModelRegistry.register_model(name, known.load_model_cls())
        except ImportError as error:
            raise RuntimeError(f"vLLM cannot load {name} in this environment: {error}") from None


def architectures_of(model: str) -> list[str]:
    """The architectures that a model's configuration names."""
    return json.loads((Path(model) / "config.json").read_text()).get("architectures") or []


def _unquantised(hf_config: Any) -> Any:
    for config in (hf_config, hf_config.get_text_config()):
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
    return hf_config


def _on_meta(vllm_config: Any) -> Any:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"file://{Path(folder) / 'store'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
            return initialize_model(vllm_config)


def main() -> None:
    asked = json.load(sys.stdin)
    print(MARK + json.dumps(outline(asked["model"], asked["steering"], asked["engine"])))


if __name__ == "__main__":
    main()
