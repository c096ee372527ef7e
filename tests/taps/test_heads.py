# SPDX-License-Identifier: Apache-2.0
"""Heads of readouts: the definition, the split of an autoencoder's weights, and the kernels on a GPU.

``test_tap_kernel.py`` runs the kernels interpreted.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.taps.random_heads import CASES, COLUMNS, TOKENS, activation, compare, differences
from vllm_steer.taps import heads
from vllm_steer.taps.heads import Activation, LensHead, Places, parts, record_top_k, top_k_outputs
from vllm_steer.taps.sparse_encoder import SparseEncoder, SparseEncoderHead

HIDDEN, VOCAB, ROWS, K = 8, 40, 7, 5
CPU = torch.device("cpu")


def test_lens_equals_log_softmax() -> None:
    """Catches values that are not normalized, and the indices of other tokens."""
    rows, unembedding = torch.randn(ROWS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    products = LensHead(lambda x: 2 * x, lambda x: x @ unembedding.T, VOCAB).products(rows)
    assert products is not None
    found = top_k_outputs(products, None, K)
    expected = (2 * rows @ unembedding.T).log_softmax(-1).topk(K)
    assert found[:, :K].long().equal(expected.indices)
    torch.testing.assert_close(found[:, K:], expected.values)


def test_parts_cover_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a part that is lost at the memory bound, and parts beyond it."""
    head = LensHead(lambda x: x, lambda x: None, VOCAB)
    monkeypatch.setattr(heads, "OUTPUT_BYTES", 2 * VOCAB * 3)
    assert parts(head, ROWS, 2) == [(0, 3), (3, 6), (6, 7)]
    assert parts(head, ROWS, 4096) == [(i, i + 1) for i in range(ROWS)]
    assert parts(head, 0, 2) == []


def test_records_that_keep_their_values() -> None:
    """Catches values in another token's record or column, and a replayed record that is overwritten."""
    record = torch.zeros(TOKENS, COLUMNS)
    places = Places(torch.tensor([4, 2]), torch.tensor([1, 3]), torch.tensor([False, True]))
    record_top_k(record, places, torch.tensor([[1.0, 3.0, 2.0]] * 2), Activation(torch.zeros(3)), 2)
    assert record.nonzero().tolist() == [[4, column] for column in range(1, 5)]
    assert record[4, 1:5].tolist() == [1, 2, 3, 2]


@pytest.mark.parametrize("kind", ["jumprelu", "gated"])
def test_split_weights_equal_the_encoder(kind: str) -> None:
    """Catches a lost lower half, ``subtracted`` that is not in the biases, and its part in the magnitudes."""
    rng = np.random.default_rng(3)
    numbers = [rng.standard_normal(VOCAB).astype("f4") for _ in range(4)]
    weights, subtracted = (
        rng.standard_normal((HIDDEN, VOCAB)).astype("f4"),
        50 * rng.standard_normal(HIDDEN).astype("f4"),
    )
    gated = kind == "gated"
    encoder = SparseEncoder(
        "gated" if gated else "jumprelu", weights, numbers[0], subtracted, None if gated else abs(numbers[1]),
        scale=numbers[2] if gated else None, magnitude_bias=numbers[3] if gated else None,
    )  # fmt: skip
    exact, split = (SparseEncoderHead(encoder, CPU, torch.bfloat16, split=each) for each in (False, True))
    rows = (torch.from_numpy(subtracted) + torch.randn(ROWS, HIDDEN)).bfloat16()
    outputs = [head.activation.of(head.products(rows)) for head in (exact, split)]
    assert split.num_bytes <= exact.num_bytes
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
    # Negative control: the upper half alone.
    split._weights = split._weights[:HIDDEN]
    assert (split.activation.of(split.products(rows)) - outputs[0]).abs().max() > 0.01


def test_weights_that_are_bfloat16_take_half_the_memory() -> None:
    """Catches a lower half of zeros that is stored and multiplied."""
    weights = np.float32([[1, -2], [0.5, 4]])
    head = SparseEncoderHead(SparseEncoder("relu", weights, np.zeros(2, "f4")), CPU, torch.bfloat16, split=True)
    assert head._weights.shape == (2, 2)


def test_comparison_detects_other_records() -> None:
    """Negative controls of the comparison: an index too high, values of another activation, one output too few."""

    def beside(record: torch.Tensor, places: Places, *given: object) -> None:
        record_top_k(record, Places(places.token, places.column, places.kept.logical_not()), *given)  # type: ignore[arg-type]

    def without(record: torch.Tensor, places: Places, products: torch.Tensor, given: Activation | None, k: int) -> None:
        record_top_k(record, places, products, activation("relu", products.shape[1], CPU, 1), k)

    assert len(list(differences(beside, CPU))) == len(list(differences(without, CPU))) == len(CASES)
    assert not list(differences(record_top_k, CPU))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "size"), CASES)
def test_kernels_match_the_definition(kind: str, size: tuple[int, int, torch.dtype]) -> None:
    """Catches wrong blocks, masks, keys and places."""
    from vllm_steer.taps.top_k_kernel import launch_top_k

    assert not compare(launch_top_k, kind, size, torch.device("cuda"))


@pytest.mark.gpu
def test_split_products_on_tensor_cores_equal_float64_products() -> None:
    """Catches products that are rounded to bfloat16 or accumulated in it."""
    device = torch.device("cuda")
    weights = torch.randn(1024, 512).numpy() / 32
    head = SparseEncoderHead(SparseEncoder("relu", weights, np.zeros(512, "f4")), device, torch.bfloat16)
    rows = torch.randn(33, 1024).bfloat16()
    exact = rows.double() @ torch.from_numpy(weights).double()
    assert (head.products(rows.to(device)).cpu().double() - exact).abs().max() < 2e-5
