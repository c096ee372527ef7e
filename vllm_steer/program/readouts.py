# SPDX-License-Identifier: Apache-2.0
"""Compiled readouts."""

from __future__ import annotations

import msgspec

from vllm_steer.limits import MAX_LAYERS, MAX_TOP_K
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.compiled_part import CompiledPart
from vllm_steer.request import Selector
from vllm_steer.request.probe import ACTIVATIONS
from vllm_steer.request.readout import KINDS, LENS, MAX_TOKEN, ReadoutKind
from vllm_steer.request.selector import Wire


class CompiledMlp(msgspec.Struct, frozen=True, array_like=True):
    """The second half of a probe with a hidden layer, whose weights are vectors of the program."""

    activation: str
    biases: bytes
    """float32 ``[n]``."""
    outputs: bytes
    """float32 ``[n]``."""

    def is_sound(self, width: int) -> bool:
        """Return whether the parts fit a hidden layer of ``width`` units."""
        return len(self.biases) == len(self.outputs) == 4 * width and self.activation in ACTIVATIONS


class CompiledReadout(msgspec.Struct, frozen=True, array_like=True):
    """A readout: products of the stream at a site with vectors of the program.

    ``probes`` names probes of modules instead of vectors until the request is composed.
    """

    name: str
    scalar: bool
    point: int
    layer: int
    vectors: tuple[int, ...]
    bias: float
    sigmoid: bool
    tokens: Wire
    probes: tuple[str, ...] = ()
    head: str = ""
    """`LENS`, or `SAE_PREFIX` and the name of an autoencoder; empty for products with vectors."""
    top_k: int = 0
    """Number of the largest outputs of the head that are returned, for each of ``layers``."""
    layers: tuple[int, ...] = ()
    cosine: bool = False
    """Whether the product is divided by the norms of its factors. The vector has length 1 then, unless it is zero: the
    norm of other weights can underflow or overflow float32, in which it is taken again."""
    parts: tuple[CompiledPart, ...] = ()
    """Parts of the output to which the returned tokens are restricted."""
    mlp: CompiledMlp | None = None
    """The rest of a probe with a hidden layer; None for other readouts."""
    omitted: tuple[str, ...] = ()
    """Fields that the named probe, the autoencoder or the model fills in when the request is composed. `site` means
    that the site of the autoencoder is not compared yet."""
    targets: tuple[int, ...] = ()
    """Outputs of the head that are returned, ``top_k`` of them; empty for the largest ones."""

    @property
    def site_number(self) -> int:
        """Number of the site."""
        return self.layer * len(POINT_NAMES) + self.point

    @property
    def kind(self) -> ReadoutKind:
        """Kind of the readout."""
        return KINDS[self.head.partition(":")[0] or ("probe" if self.scalar else "projections")]

    @property
    def form(self) -> float:
        """Value of ``low`` in a READ instruction: 1 for a sigmoid plus 2 for a cosine."""
        return self.sigmoid + 2.0 * self.cosine

    def is_sound(self, num_vectors: int) -> bool:
        """Whether indices, sizes and layers fit each other in a program with so many vectors."""
        return (
            0 <= self.point < len(POINT_NAMES)
            and 0 <= self.layer < MAX_LAYERS
            and all(0 <= index < num_vectors for index in self.vectors)
            and (self.mlp is None or (self.scalar and self.mlp.is_sound(len(self.vectors))))
            and self.width > 0
            and bool(self.head) == bool(self.top_k) == bool(self.layers)
            and 0 <= self.top_k <= MAX_TOP_K
            and all(0 <= layer < MAX_LAYERS for layer in self.layers)
            and (not self.targets or (self.head == LENS and len(self.targets) == self.top_k))
            and all(0 <= target <= MAX_TOKEN for target in self.targets)
        )

    @property
    def width(self) -> int:
        """Number of columns. For each of its layers, a head has the indices of its largest outputs, then their values.

        Indices are exact in float32 up to 2^24.
        """
        if self.kind.has_head:
            return 2 * self.top_k * len(self.layers)
        return 1 if self.mlp else len(self.vectors or self.probes)

    @property
    def selector(self) -> Selector:
        """The tokens whose values are returned."""
        return Selector.from_wire(self.tokens)
