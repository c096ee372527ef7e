# SPDX-License-Identifier: Apache-2.0
"""Script: print what the plug-in changes in a front end of vLLM, with and without steering.

python -m tests.plugin.changes MODEL server|offline [FLAG ...]
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

CACHES = ("_abc_", "__pydantic", "__slotnames__")
"""First words of the attributes of a class that Python and pydantic set when the class is used."""


def load_front_end() -> None:
    """Import everything of vLLM that a server imports later."""
    import vllm.entrypoints.launchers.app
    import vllm.entrypoints.launchers.run_batch
    import vllm.entrypoints.openai.chat_completion.serving
    import vllm.entrypoints.openai.completion.serving
    import vllm.entrypoints.speech_to_text.transcription.protocol
    import vllm.entrypoints.speech_to_text.translation.protocol
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.llm_engine  # noqa: F401


def names() -> dict[str, Any]:
    """Return the classes and functions of vLLM's modules, and the attributes of the classes, by name."""
    found: dict[str, Any] = {}
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.") and module is not None]:
        for name, value in list(vars(module).items()):
            if not inspect.isclass(value):
                if inspect.isroutine(value):
                    found[f"{module.__name__}:{name}"] = value
                continue
            found[f"{module.__name__}:{name}"] = value
            if value.__module__ == module.__name__:
                attributes = [each for each in vars(value) if not each.startswith(CACHES)]
                found |= {f"{module.__name__}:{name}.{each}": vars(value)[each] for each in attributes}
    return found


def main(model: str, mode: str, *flags: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.entrypoints.launchers.app import build_app
    from vllm.plugins import load_general_plugins

    from tests.server_parser import server_parser

    load_front_end()
    stock = names()
    load_general_plugins()
    parser = server_parser()
    args = parser.parse_args(["--model", model, "--enforce-eager", "--dtype", "float32", *flags])
    (AsyncEngineArgs if mode == "server" else EngineArgs).from_cli_args(args).create_engine_config()
    app = build_app(args, ("generate",))
    app.build_middleware_stack()
    now = names()
    print("changes", json.dumps({
        "names": sorted(name for name, value in now.items() if name in stock and stock[name] is not value),
        "attributes": sorted(
            name for name in now.keys() - stock.keys() if name.rpartition(".")[0] in stock and ":" in name
        ),
        "middleware": [str(each.cls.__module__) for each in app.user_middleware],
        "routes": sorted(str(getattr(route, "path", route)) for route in app.routes),
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
