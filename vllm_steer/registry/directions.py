# SPDX-License-Identifier: Apache-2.0
"""Directions in the residual stream, and files of them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.points import PointName
from vllm_steer.registry.metadata import ModuleMetadata, encode_numbers, parse_metadata
from vllm_steer.registry.module import Module, parse_module
from vllm_steer.registry.vector_files import check_suffix, read_vector_file, write_vector_file
from vllm_steer.request import Edit
from vllm_steer.request.capture_source import no_dose
from vllm_steer.request.scalars import FLOAT32_MAX, shown
from vllm_steer.request.sites import Layers

Array: TypeAlias = npt.NDArray[np.float32]
WITHOUT_FIRST = ((1, None),)
"""Positions of all tokens but the first, whose stream does not depend on the text and is many times longer."""


@dataclass(frozen=True, eq=False)
class Direction:
    """A direction at a hook point of a layer, from the negative to the positive examples.

    A *dose* is the length of the added vector divided by the median length of the stream, so that a number means about
    the same in each layer and model.
    """

    point: PointName
    layer: int
    unit: Array = field(repr=False)
    """``[hidden]``, with length 1."""
    stream: float
    """Median length of the stream's rows, without the first token; NaN if a file does not tell."""
    distance: float = 1.0
    """Distance of the means of the two classes along the direction."""
    centre: Array | None = field(default=None, repr=False)
    """Midpoint of the means of the two classes ``[hidden]``; None if the direction was read from a file."""
    auroc: float = float("nan")
    """Probability that a positive example that the direction was not made of is further along than a negative one."""

    @property
    def vector(self) -> Array:
        """The vector of a file, which moves the mean of the negative examples to that of the positive ones."""
        return (self.unit * self.distance).astype(np.float32)

    @property
    def dose(self) -> float:
        """Dose of `vector` with strength 1."""
        return self.distance / self.stream

    def strength(self, dose: float) -> float:
        """Return the strength with which `vector` adds a dose.

        Raises:
            SteeringError: `stream` is unknown, or float32 does not have the strength.
        """
        if not self.stream > 0:
            raise no_dose(f"the vector of {self.point}[{self.layer}]")
        strength = dose * self.stream / self.distance
        if not abs(strength) <= FLOAT32_MAX:
            where = f"the vector of {self.point}[{self.layer}], whose length is {abs(self.distance):.3g}"
            problem = f"a dose of {dose:g} is {strength:.3g} times {where}, more than float32 has"
            raise SteeringError("dose", f"{problem}; register a longer vector")
        return strength

    def direction_at(self, point: str | None, layers: Layers) -> Direction:
        """Return this direction; raise SteeringError for another site."""
        return Directions({self.layer: self}, "", "", {}).direction_at(point, layers)

    def add(self, dose: float, **fields: Any) -> Edit:
        """Return the edit that adds a dose of the direction; ``fields`` are further arguments of `Edit`."""
        return Edit("add", point=self.point, layers=self.layer, vector=self, dose=dose, **fields)

    def clamp(self, **fields: Any) -> Edit:
        """Return the edit that holds the stream's component along the direction at the midpoint of the classes.

        By default it leaves the first token alone: its stream is the same in all texts, and other tokens attend to it.
        """
        middle = self._middle
        given = {"tokens": [list(each) for each in WITHOUT_FIRST], **fields}
        return Edit("clamp", point=self.point, layers=self.layer, vector=self.unit, low=middle, high=middle, **given)

    def probe(self, **fields: Any) -> dict[str, Any]:
        """Return a readout: the component along the direction, 1 at the mean of the positives and -1 at the other's."""
        scale = 2 / self.distance
        where = {"point": self.point, "layer": self.layer}
        return {"probe": self.unit * np.float32(scale), "bias": -scale * self._middle, **where, **fields}

    @property
    def _middle(self) -> float:
        """Component of the midpoint of the classes along the direction."""
        if self.centre is None:
            raise SteeringError("direction", "has no midpoint of two classes; make it of examples with make")
        return float(self.centre @ self.unit)

    def random(self, count: int = 20, seed: int = 0) -> list[Direction]:
        """Return random directions with the same site and length."""
        drawn = np.random.default_rng([seed, self.layer]).standard_normal((count, len(self.unit)))
        units = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)
        return [replace(self, unit=unit) for unit in units]


@dataclass(frozen=True, eq=False, repr=False)
class Directions(Mapping[int, Direction]):
    """Directions of one hook point by layer, and how they were made.

    Examples:
        >>> from vllm_steer.lab import make  # doctest: +SKIP
        >>> directions = make(llm, "pairs.jsonl", layers=range(8, 24))  # doctest: +SKIP
        >>> directions.save("calm.safetensors", layers=[directions.best])  # doctest: +SKIP
    """

    by_layer: Mapping[int, Direction]
    model: str
    method: str
    provenance: Mapping[str, str]
    """Description of the examples and settings."""

    def __getitem__(self, layer: int) -> Direction:
        if (found := self.by_layer.get(layer)) is None:
            raise KeyError(f"no direction of layer {layer}; use one of {', '.join(map(str, self))}")
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self.by_layer)

    def __len__(self) -> int:
        return len(self.by_layer)

    def __repr__(self) -> str:
        lines = [
            f"Directions at {self.point}, method {self.method or 'unknown'}",
            "layer   auroc  stream  distance    dose",
        ]
        lines += [
            f"{each.layer:5} {each.auroc:7.3f} {each.stream:7.4g} {each.distance:9.4g} {each.dose:7.3g}"
            for each in self.values()
        ]
        return "\n".join(lines)

    @property
    def point(self) -> PointName:
        """The hook point."""
        return next(iter(self.values())).point

    def direction_at(self, point: str | None, layers: Layers) -> Direction:
        """Return the direction for an edit of one layer.

        Raises:
            SteeringError: The edit has several layers, or another site than the directions.
        """
        if isinstance(layers, str) or len(layers) != 1:
            problem = f"must be one layer, whose vector is taken, not {shown(layers)}"
            raise SteeringError("layers", f"{problem}; send one edit for each layer, or an expression")
        if point != self.point:
            raise SteeringError("point", f"is {point}, but the vectors are of {self.point}; use that point")
        if (layer := int(layers[0])) not in self:
            raise SteeringError("layers", f"has no vector of layer {layer}; use one of {', '.join(map(str, self))}")
        return self[layer]

    @property
    def best(self) -> int:
        """The layer with the largest AUROC; of equal ones, the middle one."""
        most = max((each.auroc for each in self.values() if each.auroc == each.auroc), default=None)
        equal = [layer for layer, each in self.items() if most is None or each.auroc == most]
        return equal[len(equal) // 2]

    @classmethod
    def load(cls, path: str | Path) -> Directions:
        """Read the vectors of a file in any format; one that `save` has written tells the lengths of the stream.

        Raises:
            SteeringError: The file cannot be read, or has something else than vectors of layers of one hook point.
        """
        return cls.of(*read_vector_file(path), name=str(path))

    @classmethod
    def of(cls, module: Module, metadata: ModuleMetadata, name: str) -> Directions:
        """Return the directions of a module, which is called ``name`` in errors.

        Raises:
            SteeringError: The module has something else than vectors of layers of one hook point.
        """
        if not module.all_edits:
            raise SteeringError("vectors", only_probes(module, name))
        if not module.base or len(module.all_edits) > len(module.base):
            raise SteeringError("vectors", _other_edits(module, name))
        if len(points := {edit.point for edit in module.base}) > 1:
            raise SteeringError("vectors", f"{name} has vectors at {', '.join(map(str, points))}; use one hook point")
        found, streams, aurocs = {}, metadata.streams, metadata.numbers("auroc")
        for edit in module.base:
            vector = edit.vector.astype(np.float64)
            layer, distance = int(edit.layers[0]), float(np.linalg.norm(vector)) * edit.strength
            if not distance or edit.point is None:
                raise SteeringError("vectors", f"{name} has a vector of zeros at layer {layer}; remove it")
            unit = (vector * (edit.strength / abs(distance))).astype(np.float32)
            length, auroc = (each.get(layer, float("nan")) for each in (streams, aurocs))
            found[layer] = Direction(edit.point, layer, unit, length, abs(distance), auroc=auroc)
        return cls(found, metadata.model or "", metadata.provenance.get("method", ""), metadata.provenance)

    def save(self, path: str | Path, layers: Sequence[int] | None = None) -> None:
        """Write a module (``.safetensors``) or a control vector (``.gguf``). An existing file is replaced as a whole.

        Args:
            path: The file.
            layers: Layers to write; all by default. Requests that use the file are steered at all of its layers.

        Raises:
            SteeringError: There is no such layer, or the file cannot be written.
        """
        chosen = list(self if layers is None else layers)
        if missing := [layer for layer in chosen if layer not in self]:
            raise SteeringError("layers", f"has no direction of layer {missing[0]}; use some of {list(self)}")
        vectors = {self.point: {str(layer): self[layer].vector for layer in chosen}}
        about = {
            **self.provenance,
            "stream": encode_numbers({layer: self[layer].stream for layer in chosen if self[layer].stream > 0}),
            "auroc": encode_numbers({layer: self[layer].auroc for layer in chosen}),
        }
        save_module(path, {"base": vectors}, self.model, {"method": self.method, **about})


def only_probes(module: Module, name: object) -> str:
    """Return the problem of a module without edits where one is needed."""
    probe = f"{name}/{next(iter(module.probes), 'probe')}"
    return f'{name} has probes and no vectors; name a probe in readouts or as {{"module": "{probe}"}} in an edit'


def _other_edits(module: Module, name: object) -> str:
    """Return the problem of a module with edits that have no dose."""
    tiers = [tier for tier in ("prefill", "decode") if getattr(module, tier)]
    if tiers and not module.edits:
        problem = f"{name} has vectors in {' and '.join(tiers)}; doses, expressions and edits take those of base"
        called = str(name).rpartition("/")[2].removesuffix(".safetensors")
        example = f"0.2 {called}@{'generated' if module.decode else 'prompt'}"
        return f"{problem}: save them as base and select tokens, such as {example}, or use the module with a scale"
    return f"{name} is a module with other edits than vectors of layers; save those alone, or use it with a scale"


def streams_at(module: Module, metadata: ModuleMetadata, point: str, layers: Collection[int]) -> list[float]:
    """Return the lengths of the stream that a module tells at its vectors of a point, at some layers or at all."""
    sites = [edit.layers[0] for edit in module.base if edit.point == point]
    streams = metadata.streams
    return [streams[int(n)] for n in sites if n in streams and (not layers or n in layers)]


def save_module(path: str | Path, content: Mapping[str, Any], model: str, provenance: Mapping[str, str]) -> None:
    """Write the file of a module. An existing file is replaced as a whole.

    Raises:
        SteeringError: The file cannot be written.
    """
    replace_module_file(path, parse_module(content), parse_metadata({"model": model, "provenance": provenance}))


def replace_module_file(path: str | Path, module: Module, metadata: ModuleMetadata) -> None:
    """Write the file of a module as a whole.

    Raises:
        SteeringError: The file cannot be written.
    """
    target = Path(path)
    check_suffix(target)
    temporary = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        write_vector_file(temporary, module, metadata)
        temporary.replace(target)
    except OSError as error:
        problem = f"{target} cannot be written: {error.strerror or error}; make room or use another folder"
        raise SteeringError("out", f"{problem}. An existing file is as it was") from None
    finally:
        temporary.unlink(missing_ok=True)
