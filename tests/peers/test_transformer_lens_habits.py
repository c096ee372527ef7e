# SPDX-License-Identifier: Apache-2.0
"""Habits of code for TransformerLens, on an engine that runs user hooks on numbered rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_steer import HookedRows, SteeringError
from vllm_steer.peers.transformer_lens import ActivationCache, HookedTransformer, SteeringDriver
from vllm_steer.peers.transformer_lens.hooks import ReadOnlyRows
from vllm_steer.points import POINTS

HIDDEN, LAYERS, VOCAB = 4, 2, 16
NAME = "blocks.1.hook_resid_post"
PROMPTS = torch.tensor([[5, 6, 7], [8, 9, 10]])


class Engine:
    """Engine without a model, whose rows are the tokens of the prompts."""

    def __init__(self) -> None:
        config = SimpleNamespace(
            get_vocab_size=lambda: VOCAB, max_logprobs=-1, logprobs_mode="raw_logprobs", logits_processors=None
        )
        unread = {"post_attn": {1: "attention and MLP run in parallel"}}
        points = [
            {"name": name, "on": not point.optional, "unread": unread.get(name, {})} for name, point in POINTS.items()
        ]
        facts = {"num_layers": LAYERS, "hidden_size": HIDDEN, "points": points, "mixed_head": None}
        self.capabilities = lambda: facts
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config))
        self.hooks: list[Any] = []
        self.seen: list[torch.Tensor] = []
        """Rows that the hooks left, by request."""

    @contextmanager
    def register_hook(self, hook: Any, point: str, layer: int) -> Any:
        self.hooks.append(hook)
        try:
            yield
        finally:
            self.hooks.remove(hook)

    def get_tokenizer(self) -> Any:
        """Return a tokenizer of letters that adds a BOS token to texts."""

        def encode(text: str, add_special_tokens: bool = True) -> list[int]:
            return [*([1] if add_special_tokens else []), *map(ord, text)]

        return SimpleNamespace(encode=encode, decode=lambda tokens: "".join(map(chr, tokens)).replace("\1", "<s>"))

    def generate(self, requests: Sequence[Any], params: Any, use_tqdm: bool) -> list[Any]:
        self.requests, self.params = requests, params
        return [self._run(each["prompt_token_ids"]) for each in requests]

    def _run(self, tokens: Sequence[int]) -> Any:
        rows = torch.tensor(tokens, dtype=torch.float32)[:, None].repeat(1, HIDDEN)
        sample = SimpleNamespace(finish_reason="length", stop_reason=None, token_ids=[ord("!")])
        for hook in self.hooks:
            view = HookedRows(rows, torch.arange(len(rows)), "0", "post_block", 1)
            try:
                found = hook(view)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                sample = SimpleNamespace(finish_reason="error", stop_reason=reason, token_ids=[])
                break
            rows = view.rows if found is None else found
        self.seen.append(rows)
        return SimpleNamespace(outputs=[sample])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> HookedTransformer:
    """Return a model in which the stream between attention and MLP of layer 1 cannot be read."""
    monkeypatch.setattr("vllm_steer.peers.engines.open_engine", lambda *_, **__: Engine())
    return HookedTransformer("model")


def set_token(rows: torch.Tensor, pos: int, hook: Any) -> None:
    """Change a token in place; the position comes from ``partial``, ahead of the hook."""
    assert (hook.name, hook.layer()) == (NAME, 1)
    rows[:, pos] = 0.0


def keyword_only(rows: torch.Tensor, *, hook: Any) -> torch.Tensor:
    return rows * 0.0 if hook.name == NAME else rows


def other_name(rows: torch.Tensor, at: Any) -> torch.Tensor:
    return rows * 0.0 if at.name == NAME else rows


@pytest.mark.parametrize(
    ("function", "zeros"),
    [(partial(set_token, pos=1), 1), (keyword_only, 3), (other_name, 3)],
    ids=["partial", "keyword", "position"],
)
def test_functions_get_the_hook_by_name(model: HookedTransformer, function: Any, zeros: int) -> None:
    """Catches a hook passed by position only, which fails for functions whose other arguments come from ``partial``."""
    model.run_with_hooks(PROMPTS, return_type=None, fwd_hooks=[(NAME, function)])
    assert [int((rows == 0).all(-1).sum()) for rows in model.llm.seen] == [zeros] * 2


class HookPoint(torch.nn.Module):
    """A module of a hook, which returns its rows, as TransformerLens has them."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


def replay(rows: torch.Tensor, *functions: Any) -> HookPoint:
    """Call functions at a hook as a ``RemoteBridge`` does, which ignores what they return."""
    point = HookPoint()
    for function in functions:
        point.register_forward_hook(lambda module, args, output, function=function: function(output, hook=module))
    for name, captured in ReadOnlyRows({"blocks.1.hook_resid_post": rows}).items():
        assert name == "blocks.1.hook_resid_post"
        HookPoint()(captured + 1)
        point(captured)
    assert not torch.nn.modules.module._global_forward_pre_hooks
    return point


def patch_one(rows: torch.Tensor, hook: Any) -> torch.Tensor:
    """Write one token in place and return the rows, as the setters of TransformerLens' ``patching`` do."""
    rows[:, 1] = 7.0
    return rows


@pytest.mark.parametrize(
    "function",
    [
        patch_one,
        lambda rows, hook: rows + 1,
        lambda rows, hook: torch.zeros_like(rows),
        lambda rows, hook: rows.mul_(2).sum() and None,
        lambda rows, hook: rows[:1],
    ],
)
def test_writes_at_hooks_of_a_bridge_are_refused(function: Any) -> None:
    """Catches the grid of ``patching`` in which nothing is patched, since the bridge ignores what functions return."""
    with pytest.raises(SteeringError, match=r"fwd_hooks\.blocks\.1\.hook_resid_post: .*intervene=.*PatchingStudy"):
        replay(torch.ones(2, 4, 8), function)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_functions_that_read_at_hooks_of_a_bridge_run() -> None:
    """Catches a refusal of functions that only read, and a check that stays at the hook."""
    seen: list[float] = []
    rows = torch.ones(2, 4, 8)
    point = replay(rows, lambda rows, hook: seen.append(float(rows.sum())), lambda rows, hook: rows.clone())
    assert seen == [64.0]
    assert len(point._forward_hooks) == 2
    cached = ReadOnlyRows({"a": rows, "b": rows})
    assert (dict(cached), len(cached), cached["a"] is rows) == ({"a": rows, "b": rows}, 2, True)


def test_rows_of_several_prompts_are_refused(model: HookedTransformer) -> None:
    """Catches rows of the first prompt put into all prompts if a function returns rows of the batch."""
    batch = torch.zeros(2, 3, HIDDEN)
    with pytest.raises(RuntimeError, match=r"rows of shape \[1, 3, 4\], not \[2, 3, 4\]"):
        model.run_with_hooks(PROMPTS, return_type=None, fwd_hooks=[(NAME, lambda rows, hook: batch)])
    model.run_with_hooks(PROMPTS, return_type=None, fwd_hooks=[(NAME, lambda rows, hook: batch[:1])])
    assert not torch.stack(model.llm.seen[-2:]).any()


def test_the_batch_dimension_is_removed_in_place() -> None:
    """Catches a cache that keeps its batch dimension, and a second call that removes the tokens of a short prompt."""
    cache = ActivationCache({NAME: torch.zeros(1, 1, HIDDEN)}, LAYERS)
    cache.remove_batch_dim()
    assert (cache["resid_post", 1].shape, cache.has_batch_dim) == ((1, HIDDEN), False)
    assert cache.remove_batch_dim() is cache
    assert cache[NAME].shape == (1, HIDDEN)
    with pytest.raises(SteeringError, match="several prompts"):
        ActivationCache({NAME: torch.zeros(2, 1, HIDDEN)}, LAYERS).remove_batch_dim()


def test_all_layers_are_stacked() -> None:
    """Catches None refused as the number of layers."""
    cache = ActivationCache({f"blocks.{i}.hook_resid_post": torch.zeros(1, 3, HIDDEN) for i in range(LAYERS)}, LAYERS)
    assert cache.stack_activation("resid_post", None).shape == (LAYERS, 1, 3, HIDDEN)


def test_hooks_that_cannot_be_read_are_not_listed(model: HookedTransformer) -> None:
    """Catches a default of ``names_filter`` that the engine refuses, and advice to switch on a point that is on."""
    assert "blocks.0.hook_resid_mid" in model.hook_names
    assert "blocks.1.hook_resid_mid" not in model.hook_names
    with pytest.raises(SteeringError, match="resid_mid is not supported: attention and MLP run in parallel"):
        model.run_with_cache(PROMPTS, names_filter="blocks.1.hook_resid_mid")


@pytest.mark.parametrize("call", [HookedTransformer.__call__, HookedTransformer.to_tokens])
def test_arguments_are_refused_with_the_reason(model: HookedTransformer, call: Any) -> None:
    """Catches a ``TypeError`` for an argument of TransformerLens."""
    with pytest.raises(SteeringError, match="the tokenizer decides"):
        call(model, "one", prepend_bos=False)


def test_generated_text(model: HookedTransformer) -> None:
    """Catches a BOS token in the text, and arguments and prompts that end in a ``TypeError`` or ``ValueError``."""
    assert model.generate("one") == "one!"
    assert model.generate(torch.tensor([1, ord("a")])) == "<s>a!"
    for arguments, message in (
        ({"prompt": "one", "verbose": False}, "verbose: a progress bar is not shown"),
        ({"prompt": "one", "do_sample": True}, "do_sample: .*temperature=0"),
        ({"prompt": ["one", "two"]}, "prompt: has 2 prompts"),
    ):
        with pytest.raises(SteeringError, match=message):
            model.generate(**arguments)


def test_requests_that_ended_with_an_error_raise(model: HookedTransformer) -> None:
    """Catches the prompt alone as the generated text, and no tokens or an ``IndexError`` for the reason."""

    def fail(view: HookedRows) -> None:
        raise ValueError("boom")

    driver = SteeringDriver("model", SimpleNamespace())
    for engine, call in (
        (model, lambda: model.generate("one")),
        (model, lambda: model.run_with_edits("one", [])),
        (driver._model, lambda: driver.forward(PROMPTS, return_logits=False)),
    ):
        with (
            engine.llm.register_hook(fail, "post_block", 1),
            pytest.raises(RuntimeError, match=r"prompts\[0\]: ValueError: boom"),
        ):
            call()


@pytest.mark.parametrize(
    "prompts", [[torch.tensor([5, 6]), torch.tensor([7, 8])], [np.array([5, 6]), (7, 8)], np.array([[5, 6], [7, 8]])]
)
def test_tokens_are_sent_as_integers(model: HookedTransformer, prompts: Any) -> None:
    """Catches tensors in requests, after which an engine in a process of its own never answers again."""
    model(prompts, return_type=None)
    sent = [each["prompt_token_ids"] for each in model.llm.requests]
    assert sent == [[5, 6], [7, 8]]
    assert {type(token) for tokens in sent for token in tokens} == {int}


@pytest.mark.parametrize("prompts", [[[1.5, 2.0]], [torch.tensor(1), torch.tensor(2)], torch.tensor([1.0, 2.0])])
def test_prompts_without_integers_are_refused(model: HookedTransformer, prompts: Any) -> None:
    """Catches fractions that are accepted as tokens, and a ``TypeError`` for the reason."""
    with pytest.raises(SteeringError, match=r"prompts\[0\]: must be a text or a list of token numbers"):
        model(prompts, return_type=None)


def test_layers_of_numpy_are_found() -> None:
    """Catches a layer of ``numpy.arange`` refused as one that the model lacks."""
    cache = ActivationCache({NAME: torch.zeros(1, 3, HIDDEN)}, LAYERS)
    assert cache["resid_post", np.int64(1)] is cache[NAME]


def test_counts_of_numpy_are_sent_as_integers(model: HookedTransformer) -> None:
    """Catches a request that cannot be sent, for whose answer the next call waits without end."""
    model.generate("one", max_new_tokens=np.int64(3))
    assert type(model.llm.params.max_tokens) is int
    driver = SteeringDriver("model", SimpleNamespace())
    driver.forward(PROMPTS, max_new_tokens=np.int64(3), return_logits=False)
    assert type(driver._model.llm.params.max_tokens) is int
