# SPDX-License-Identifier: Apache-2.0
"""Table of the formats of vector files: how each is recognised, and what its layer numbers mean.

The reader, its error messages and ``docs/guides/vector-files.md`` derive from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vllm_steer.points import PointName


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """A kind of vector file, recognised by its content."""

    tools: str
    """Tools that write it."""
    content: str
    """Content by which it is recognised."""
    numbering: str
    """Meaning of its layer numbers."""
    traps: str
    """Differences between tools."""
    point: PointName | None = None
    """Hook point of all vectors; None if the file names it, or if it has to be given."""
    offset: int = 0
    """Our layer number minus the file's."""
    needs_layer: bool = False
    """Whether the layers have to be given."""


FORMATS: Mapping[str, VectorFormat] = MappingProxyType(
    {
        "control-vector": VectorFormat(
            "repeng, EasySteer, `llama.cpp --control-vector`",
            "GGUF, `general.architecture` is `controlvector`, tensors `direction.N`",
            "`direction.N` is post_block of layer N",
            "The file has all layers that were trained, while the model usually controlled some: take those with "
            "`--layer`. Directions of repeng's PCA have length 1. llama.cpp refuses `direction.0`",
            point="post_block",
        ),
        "cvector-generator": VectorFormat(
            "`llama-cvector-generator`",
            "as above, with a signed integer in `controlvector.layer_count`",
            "`direction.N` was computed at post_block of layer N - 1",
            "llama.cpp itself adds `direction.N` at post_block of layer N. `control-vector` steers as llama.cpp does, "
            "`cvector-generator` where the direction was computed",
            point="post_block",
            offset=-1,
        ),
        "svec": VectorFormat(
            "IBM activation-steering, AISteer360",
            'JSON with `{"model_type", "directions": {"N": [...]}}`',
            "`N` is a layer; the hook point is not in the file",
            "IBM's library computes direction N at post_block of layer N and adds it at pre_attn of layer N, one layer "
            "earlier: choose with `--point`. Several rows for one layer (AISteer360) are refused",
        ),
        "neuronpedia": VectorFormat(
            "Neuronpedia: vectors and uploads",
            "JSON with `hookName` and `values`, or with `hookType`, `layerNumber` and `vector`",
            "the hook has its name in TransformerLens: `blocks.N.hook_resid_pre` is pre_attn of layer N",
            "The default strength is kept in the provenance and not multiplied. With `normalize_steering`, Neuronpedia "
            "divides the vector by its length first",
        ),
        "sites": VectorFormat(
            "any library, as safetensors, `.npz` or `.pt`",
            "tensors named as sites: `blocks.N.hook_resid_post`, `layers.N`, `resid_post.N`, `post_block.N`",
            "as the names say",
            "`hidden_states.N` is refused, because the last one of a model is after the final norm",
        ),
        "layers": VectorFormat(
            "steering-vectors: `torch.save(vector.layer_activations, FILE)`",
            "tensors in safetensors, `.npz` or `.pt`, named by numbers only",
            "the number is a layer; the hook point is not in the file",
            "The `layer_type` `decoder_block` of steering-vectors is post_block. A saved `SteeringVector` itself is "
            "refused: it is an object of Python",
        ),
        "vector": VectorFormat(
            "CAA, refusal_direction, NumPy",
            "one tensor `[H]` or `[1, H]` in `.pt`, `.npy`, `.npz` or safetensors",
            "neither the layer nor the hook point is in the file",
            "CAA's `vec_layer_N` is post_block of layer N. refusal_direction's `layer` N is pre_attn of layer N",
            needs_layer=True,
        ),
        "hidden-states": VectorFormat(
            "persona_vectors",
            "one tensor `[layers + 1, H]` in `.pt`, `.npy`, `.npz` or safetensors",
            "row N is hidden_states[N], which is post_block of layer N - 1",
            "Row 0 is the embedding, and the last row is after the final norm: neither is taken. Layer 20 of the paper "
            "is row 20, which is `--layer 19`",
            point="post_block",
            offset=-1,
            needs_layer=True,
        ),
        "rows": VectorFormat(
            "NumPy, PyTorch",
            "one tensor `[layers, H]` in the same files",
            "row N is layer N; the hook point is not in the file",
            "A matrix does not tell whether its first row is the embedding, so that it is read with `--format` only",
        ),
    }
)
"""Formats by name, the value of ``--format``."""
