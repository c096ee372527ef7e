# SPDX-License-Identifier: Apache-2.0
"""Tests of multimodal models: positions count image tokens, and the vision tower is never touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.answers import params, run, tokens_of
from tests.engine.captures import capture, result
from tests.engine.conftest import opened
from tests.engine.multimodal import IMAGE_TOKENS, image, processor, save_tiny_idefics
from tests.tiny import LAYERS, direction
from vllm_steer import Edit
from vllm_steer.models import discovery
from vllm_steer.models.recipe import qualified_name
from vllm_steer.models.recipes import RECIPES

IMAGE_TEXT, PLAIN_TEXT = "t1 t2 t3 <image> t4 t5 t6", "t7 t8 t9 t10 t11"
EDITED, VECTOR = 1, direction(1)
# Three words and the two tokens ahead of an image.
FIRST_IMAGE_TOKEN = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_idefics(tmp_path_factory.mktemp("idefics"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    from vllm import ModelRegistry
    from vllm.model_executor.models.idefics3 import Idefics3ForConditionalGeneration

    # vLLM starts a process to look at a class that it knows by name only.
    ModelRegistry.register_model("Idefics3ForConditionalGeneration", Idefics3ForConditionalGeneration)
    with opened(folder, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 1}, max_num_seqs=16) as engine:
        yield engine


def with_image(seed: int, text: str = IMAGE_TEXT) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": image(seed)}}


def edit(tokens: Any) -> list[Edit]:
    return [Edit(kind="add", point="post_block", layers=EDITED, vector=VECTOR, tokens=tokens)]


CASES: list[tuple[int | None, Any]] = [
    (1, None), (2, None), (None, None), (1, "all"), (2, "last_prompt"), (None, "all"),
    (1, [[FIRST_IMAGE_TOKEN, FIRST_IMAGE_TOKEN + IMAGE_TOKENS]]), (2, "generated"),
]  # fmt: skip


@pytest.mark.feature("multimodal", "steer", "capture")
def test_matches_transformers_for_text_and_images(llm: Any, folder: Path) -> None:
    """Catches positions that count an image as one token, and rows of another image."""
    from transformers import Idefics3ForConditionalGeneration

    prompts = [with_image(seed) if seed else {"prompt": PLAIN_TEXT} for seed, _ in CASES]
    wanted = [params(4, logprobs=None, capture=capture(), steering=tokens and edit(tokens)) for _, tokens in CASES]
    outputs = run(llm, prompts, wanted)
    model = Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    for (seed, tokens), got in zip(CASES, outputs, strict=True):
        length = len(got.prompt_token_ids)
        assert length == (5 if seed is None else 6 + 3 + IMAGE_TOKENS)
        ids = [*got.prompt_token_ids, *tokens_of(got)]
        covered = {
            None: [], "all": range(len(ids)), "last_prompt": [length - 1], "generated": range(length, len(ids)),
        }[tokens] if not isinstance(tokens, list) else range(*tokens[0])  # fmt: skip
        rows, predicted = _reference(model, ids[:-1], seed, list(covered))
        assert predicted[length - 1 :] == tokens_of(got), (seed, tokens)
        for layer in range(LAYERS):
            torch.testing.assert_close(
                result(got).tensor("post_block", layer),
                rows[layer],
                atol=5e-3,
                rtol=1e-3,
                msg=f"{seed} {tokens} {layer}",
            )
        assert result(got).positions("post_block", 0).tolist() == list(range(len(ids) - 1))


def _reference(model: Any, ids: list[int], seed: int | None, covered: list[int]) -> tuple[list[Any], list[int]]:
    """Return each block's output and the greedy token at each position."""
    pixels = {} if seed is None else dict(processor()(images=[image(seed)], text=IMAGE_TEXT, return_tensors="pt"))
    rows: list[Any] = []

    def hook(module: Any, args: Any, output: Any) -> Any:
        stream = output[0] if isinstance(output, tuple) else output
        if len(rows) == EDITED:
            at = [position for position in covered if position < len(ids)]
            stream[0, at] += torch.from_numpy(VECTOR)
        rows.append(stream[0].clone())

    handles = [layer.register_forward_hook(hook) for layer in model.model.text_model.layers]
    pixels = {name: value for name, value in pixels.items() if name.startswith("pixel")}
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False, **pixels).logits[0]
    for handle in handles:
        handle.remove()
    return rows, logits.argmax(-1).tolist()


@pytest.mark.feature("multimodal", "steer")
def test_cache_keys_include_images_and_edits(llm: Any) -> None:
    """Catches KV of one image or edit served to a request with another."""
    text = IMAGE_TEXT + " t20" * 150
    requests = [(seed, tokens) for seed in (3, 4) for tokens in (None, "all")]
    cached = [
        run(llm, [with_image(seed, text)], [params(1, steering=tokens and edit(tokens))])[0].num_cached_tokens
        for seed, tokens in requests * 2
    ]
    assert cached[:4] == [0] * 4
    assert min(cached[4:]) >= 128


@pytest.mark.feature("multimodal", "steer", "capture")
def test_taps_only_the_language_model(llm: Any) -> None:
    """Catches taps in the vision tower, whose blocks have other widths and tokens."""
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    hooked = [name for name, module in model.named_modules() if hasattr(module, "steering_taps")]
    assert len(hooked) == LAYERS
    assert all("text_model" in name and "vision" not in name for name in hooked)


def test_search_of_the_whole_model_finds_the_tower(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the tower has a list of as many layers."""
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    config = llm.model_config.hf_text_config
    assert len(discovery.find_decoder(model, config).layers) == LAYERS
    tower = model.model.vision_model.encoder.layers[0]
    recipe = replace(next(iter(RECIPES.values())), layer_class=qualified_name(type(tower)))
    monkeypatch.setitem(RECIPES, recipe.layer_class, recipe)
    assert len(discovery.find_decoder(model, config).layers) == LAYERS
    monkeypatch.setattr(discovery, "supports_multimodal", lambda model: False)
    with pytest.raises(discovery.UnsupportedModelError, match="2 lists of 4 decoder layers"):
        discovery.find_decoder(model, config)
