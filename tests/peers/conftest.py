# SPDX-License-Identifier: Apache-2.0
"""One engine for each file of tests, and HF Transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import close
from tests.server.server import save_model
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


def hidden_states(hf: Any, token_ids: list[int]) -> list[torch.Tensor]:
    """Return ``[tokens, hidden]`` for each entry of HF's ``hidden_states``."""
    with torch.no_grad():
        states = hf(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return [state[0] for state in states]
