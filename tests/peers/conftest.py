# SPDX-License-Identifier: Apache-2.0
"""One engine for each file of tests, and HF Transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import close
from tests.peers.adapters import save_random_adapter
from tests.server.server import run_server, save_model
from tests.tiny import make_llm


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("peers-model"))


@pytest.fixture(scope="module")  # not "session": an engine of another folder would end this one's parallel groups
def engine(model_path: Path) -> Iterator[Any]:
    """Return an engine whose requests can have steering."""
    llm = make_llm(
        model_path, skip_tokenizer_init=False, max_model_len=128, max_logprobs=-1,
        steering_config={"points": ["attn_out", "mlp_in", "mlp_out"], "user_hooks": True},
    )  # fmt: skip
    yield llm
    close(llm)


@pytest.fixture(scope="session")
def hf(model_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@contextmanager
def hooked(module: Any, change: Callable[[torch.Tensor], Any], *, prepend: bool = False) -> Iterator[None]:
    """Call a function with the rows ``[batch, tokens, hidden]`` that a module of HF returns, or replace them by its.

    Args:
        module: The module.
        change: The function; if it returns None, the rows stay.
        prepend: Whether it runs ahead of other hooks.
    """

    def hook(module: Any, args: Any, output: Any) -> Any:
        rows = change(output[0] if isinstance(output, tuple) else output)
        return (rows, *output[1:]) if rows is not None and isinstance(output, tuple) else rows

    handle = module.register_forward_hook(hook, prepend=prepend)
    try:
        yield
    finally:
        handle.remove()


def replaced(position: int, row: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the change that puts a row at a position."""

    def put(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[0, position] = row
        return rows

    return put


def logits_of(hf: Any, tokens: Any) -> torch.Tensor:
    """Return HF's logits ``[batch, tokens, vocab]``."""
    with torch.no_grad():
        logits: torch.Tensor = hf(torch.as_tensor(tokens)).logits
    return logits


def outputs_of(hf: Any, tokens: list[int], modules: Iterable[Any]) -> list[torch.Tensor]:
    """Return the rows ``[tokens, hidden]`` that modules of HF return, in the order in which they run."""
    found: list[torch.Tensor] = []
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(hooked(module, lambda rows: found.append(rows[0])))
        logits_of(hf, [tokens])
    return found


def hidden_states(hf: Any, token_ids: list[int]) -> list[torch.Tensor]:
    """Return ``[tokens, hidden]`` for each entry of HF's ``hidden_states``."""
    with torch.no_grad():
        states = hf(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return [state[0] for state in states]


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of two LoRA adapters by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_random_adapter(folder / name, seed) for seed, name in enumerate(("oracle", "other"))}


@pytest.fixture(scope="session")
def consumer_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the server's consumer ``filesystem``."""
    return tmp_path_factory.mktemp("acts")


@pytest.fixture(scope="session")
def url(
    model_path: Path, adapters: dict[str, Path], consumer_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Return the URL of a server of both peers with both adapters, whose prefill has chunks of 32 tokens."""
    flags = ["--enable-steering", "--steering-peers", "vllm-lens", "--steering-peers", "rhizonymph"]
    flags += ["--capture-inline-kib", "16", "--capture-consumers", f"filesystem:root={consumer_root}"]
    flags += ["--max-num-seqs", "16", "--max-num-batched-tokens", "32"]
    # One slot more than there are adapters: see tests/engine/test_lora.py.
    flags += ["--enable-lora", "--max-loras", "3", "--max-lora-rank", "8", "--lora-modules"]
    flags += [f"{name}={path}" for name, path in adapters.items()]
    yield from run_server(model_path, flags, tmp_path_factory.mktemp("log") / "server.log", warm=True)


def forwarded(choice: dict[str, Any], prompt: list[int] | None = None) -> list[int]:
    """Return the tokens of a choice that have rows: all but the last generated one."""
    return [*(prompt or choice["prompt_token_ids"]), *choice["token_ids"]][:-1]


def steered_states(
    hf: Any, token_ids: list[int], layer: int, rows: dict[int, torch.Tensor], *, norm_match: bool, scale: float = 1.0
) -> list[torch.Tensor]:
    """Return `hidden_states` with rows added to a layer's output at some positions."""

    def add(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        for position, row in rows.items():
            length = hidden[0, position].norm() / row.norm() if norm_match else 1.0
            hidden[0, position] += scale * length * row
        return hidden

    # Ahead of the hooks with which HF records hidden states.
    with hooked(hf.model.layers[layer], add, prepend=True):
        return hidden_states(hf, token_ids)
