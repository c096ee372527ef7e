# SPDX-License-Identifier: Apache-2.0
"""The self-check at engine start: right taps pass, and each kind of wrong taps prevents the start.

Most wrong taps are installed in a running engine, whose worker then repeats the check.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.model import save
from tests.conformance.zoo import BY_NAME
from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.conftest import opened
from tests.engine.test_off import worker_of
from tests.tiny import HIDDEN, LAYERS, VOCAB, make_llm
from tests.wrong_taps import WRONG
from vllm_steer.engine import self_check as self_check_module
from vllm_steer.engine.self_check import self_check
from vllm_steer.engine.self_check_runner import allocate_blocks
from vllm_steer.models import install
from vllm_steer.models.self_check_plan import SelfCheckError


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(BY_NAME["gpt2"], tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def engine(request: pytest.FixtureRequest, tiny_llama: Path, gpt2: Path) -> Iterator[tuple[str, Any]]:
    """Return an engine whose layers have two summands, and one whose layers have one."""
    path = tiny_llama if request.param == "llama" else gpt2
    with opened(path, max_model_len=64) as llm:
        yield request.param, llm


@contextmanager
def replaced_taps(llm: Any, put: Callable[[Any, Any], None]) -> Iterator[Any]:
    """Replace a worker's taps by those that ``put`` installs, and restore them afterwards."""
    worker = worker_of(llm)
    steering = worker.model_runner.steering
    try:
        _remove_taps(worker)
        put(steering.decoder, steering.tables)
        yield worker
    finally:
        _remove_taps(worker)
        install.install_taps(steering.decoder, steering.tables)


def _remove_taps(worker: Any) -> None:
    for module in worker.model_runner.get_model().modules():
        vars(module).pop("forward", None)


def test_right_taps_pass_with_all_hops_conclusive(engine: tuple[str, Any]) -> None:
    """Catches a check that rejects right taps, and one that compares nothing."""
    _, llm = engine
    (report,) = llm.collective_rpc("steering_capabilities")
    found = report["self_check"]
    assert (found["ran"], found["sites"], found["hops"], found["conclusive"]) == (True, 12, 8, 8)
    assert self_check(worker_of(llm))["conclusive"] == 8


def test_a_check_that_verifies_nothing_says_so(
    engine: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches "passed" in the log when the weights are too small for the check to verify anything."""
    _, llm = engine
    monkeypatch.setattr(self_check_module, "_check", lambda *_: {"hops": 8, "conclusive": 0, "sites": 12})
    monkeypatch.setattr(self_check_module.logger, "propagate", True)
    self_check(worker_of(llm))
    assert "verified none of 8 pairs" in caplog.text and "passed" not in caplog.text


def test_the_check_leaves_nothing_behind(engine: tuple[str, Any]) -> None:
    """Catches requests of the check that remain in the runner or change outputs."""
    _, llm = engine
    before = tokens_of(run(llm, [prompt(1, 2, 3)], [params()])[0])
    worker = worker_of(llm)
    self_check(worker)
    assert not [name for name in worker.model_runner.requests if name.startswith("_steering")]
    assert not worker.model_runner.steering.active
    assert tokens_of(run(llm, [prompt(1, 2, 3)], [params()])[0]) == before


def test_check_preserves_random_states(engine: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches unseeded requests that sample other tokens than in stock vLLM with the same engine seed."""
    _, llm = engine
    worker = worker_of(llm)
    steps = worker.execute_model
    drawn: list[Any] = []

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def execute(output: Any) -> Any:
        drawn.append(draw())
        return steps(output)

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    seed()
    first = draw()
    seed()
    monkeypatch.setattr(worker, "execute_model", execute)
    self_check(worker)
    # The check drew random numbers in each step, which did not change the state afterwards.
    assert drawn[0] == first and len(set(drawn)) == len(drawn) > 1
    assert draw() == first


def test_rejects_taps_in_wrong_places(engine: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that only compares values: a tap one sublayer late reads the right ones."""
    name, llm = engine
    wrongs = [wrong for wrong in WRONG if wrong.model == name]
    assert wrongs
    for wrong in wrongs:
        with monkeypatch.context() as patch:
            patch.setattr(install, wrong.replaces, wrong.maker)
            with replaced_taps(llm, install.install_taps) as worker:
                patch.undo()
                with pytest.raises(SelfCheckError, match=f"{wrong.point} of layer 0"):
                    self_check(worker)


def test_rejects_taps_of_another_layer(engine: tuple[str, Any]) -> None:
    """Catches layers counted from another number."""
    _, llm = engine

    def shifted(decoder: Any, tables: Any) -> None:
        layers = [replace(layer, number=(layer.number + 1) % decoder.num_layers) for layer in decoder.layers]
        install.install_taps(replace(decoder, layers=tuple(layers)), tables)

    with (
        replaced_taps(llm, shifted) as worker,
        pytest.raises(SelfCheckError, match="pre_attn of layer 1: rows must equal"),
    ):
        self_check(worker)


def test_rejects_a_layer_that_bypasses_its_taps(engine: tuple[str, Any]) -> None:
    """Catches a layer that is skipped or does not run through its ``forward``."""
    _, llm = engine

    def all_but_layer_2(decoder: Any, tables: Any) -> None:
        install.install_taps(decoder, tables)
        del decoder.layers[2].module.forward

    with (
        replaced_taps(llm, all_but_layer_2) as worker,
        pytest.raises(SelfCheckError, match=r"of layer 2: .*did not run"),
    ):
        self_check(worker)


def test_rejects_a_tap_that_runs_twice(engine: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches edits that are applied twice; captures are right in that case."""
    _, llm = engine

    def doubly(maker: Callable[..., Any]) -> Callable[..., Any]:
        def make(forward: Any, tap: Any) -> Any:
            def twice(*summands: Any) -> None:
                tap(*summands)
                tap(*summands)

            return maker(forward, twice)

        return make

    for name in ("_pair_mid", "_single_mid"):
        monkeypatch.setattr(install, name, doubly(getattr(install, name)))
    with replaced_taps(llm, install.install_taps) as worker:
        monkeypatch.undo()
        with pytest.raises(SelfCheckError, match="post_attn of layer 0"):
            self_check(worker)


def test_check_is_skipped_with_a_reason(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches small tables that prevent the start, and a check that is skipped silently.

    With wrong taps, the engine starts only if the check is skipped.
    """
    monkeypatch.setattr(install, "_pair_mid", next(w.maker for w in WRONG if w.replaces == "_pair_mid"))
    with pytest.raises(
        SelfCheckError,
        match=r"LlamaForCausalLM cannot be steered.*Start it with --enforce-eager .*--steering-skip-self-check",
    ):
        make_llm(tiny_llama)
    for config, said in (
        ({"max_rows": 2}, "max_rows of at least 3, not 2"),
        ({"self_check": False}, "--steering-skip-self-check"),
    ):
        with opened(tiny_llama, steering_config=config) as llm:
            (report,) = llm.collective_rpc("steering_capabilities")
        assert not report["self_check"]["ran"]
        assert said in report["self_check"]["reason"]


def test_check_fits_into_the_smallest_tables(tiny_llama: Path) -> None:
    """Catches a check that overflows small tables: one request per step, one site per request."""
    least = {"max_rows": 3, "max_vectors": 3, "max_instructions": 6, "max_segments": 4, "capture_rows": 3}
    with opened(tiny_llama, steering_config=least, max_num_seqs=1) as llm:
        (report,) = llm.collective_rpc("steering_capabilities")
    assert (report["self_check"].get("hops"), report["self_check"].get("conclusive")) == (8, 8)


def save_whisper(folder: Path) -> Path:
    """Save a tiny Whisper with random weights, and the processor that vLLM wants."""
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    names = ["<|endoftext|>", "<|startoftranscript|>", *(f"t{number}" for number in range(VOCAB - 2))]
    tokenizer = WhisperTokenizer(vocab={name: number for number, name in enumerate(names)}, merges=[])
    WhisperProcessor(WhisperFeatureExtractor(feature_size=16, chunk_length=1), tokenizer).save_pretrained(folder)
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {"encoder_layers": 2, "decoder_layers": LAYERS, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    lengths = {"max_source_positions": 50, "max_target_positions": 64}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=16, d_model=HIDDEN, init_std=0.3, decoder_start_token_id=1,
        **heads, **layers, **lengths, **ids,
    )  # fmt: skip
    torch.manual_seed(0)
    WhisperForConditionalGeneration(config).float().save_pretrained(folder)
    return folder


def test_cross_attention_without_an_encoder(tmp_path: Path) -> None:
    """Catches a check that refuses encoder-decoders: attention to no position at all is undefined on CPUs."""
    with opened(save_whisper(tmp_path), max_model_len=32, skip_tokenizer_init=False) as llm:
        (report,) = llm.collective_rpc("steering_capabilities")
    assert report["self_check"]["ran"]
    assert report["self_check"]["conclusive"] == report["self_check"]["hops"] == 2 * LAYERS


def test_circular_caches_have_one_block_for_each_request() -> None:
    """Catches more blocks than vLLM's table has columns: vLLM then stops the check, and the engine does not start."""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    if not hasattr(interface, "CircularBufferSpec"):
        pytest.skip("this version of vLLM has no circular caches")
    sizes = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = [
        interface.FullAttentionSpec(block_size=16, **sizes),
        interface.FullAttentionSpec(block_size=2, **sizes),
        interface.CircularBufferSpec(block_size=1, **sizes),
    ]
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs], num_blocks=9)
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    config = SimpleNamespace(num_lookahead_tokens=0, parallel_config=parallel)
    worker = SimpleNamespace(model_runner=SimpleNamespace(kv_cache_config=cache), vllm_config=config)
    assert allocate_blocks(worker) == [([1], [2, 3], [4]), ([5], [6, 7], [8])]
