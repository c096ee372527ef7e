# SPDX-License-Identifier: Apache-2.0
"""From the content of a vector file to vectors at our hook points. What a file does not tell has to be given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_LAYERS
from vllm_steer.points import POINT_NAMES, PointName
from vllm_steer.request.scalars import is_integer, read_choice, read_integer, shown
from vllm_steer.request.sites import read_point
from vllm_steer.request.vector import Vector, parse_vector
from vllm_steer.site_names import find_foreign_site, site
from vllm_steer.vectors.containers import Container, open_container
from vllm_steer.vectors.formats import FORMATS

CONVERT = "vllm-steer convert FILE OUT.safetensors"
"""Command that error messages advise."""
_SAE_TENSORS = frozenset(("W_enc", "W_dec", "w_enc", "w_dec", "encoder.weight", "decoder.weight"))
_DIRECTION = re.compile(r"direction\.([0-9]{1,9})")
_NUMBER = re.compile(r"[0-9]{1,9}")
_LAYER_COUNT = "controlvector.layer_count"
_UNSIGNED, _SIGNED = ({f"{sign}INT{bits}" for bits in (8, 16, 32, 64)} for sign in ("U", ""))
"""Types of this field. llama-cvector-generator writes a signed integer, other tools an unsigned one or none."""


class Choice(NamedTuple):
    """Facts about a file that its user gives. ``str`` is the options of ``vllm-steer convert`` that give them."""

    format: str | None = None
    """A name in `FORMATS`."""
    layers: tuple[int, ...] = ()
    """Layer of the file's only vector, or the layers to take from the file, in our numbering."""
    point: str | None = None
    """Hook point of vectors that have none in the file."""

    def __str__(self) -> str:
        options = {"--format": [self.format], "--layer": self.layers, "--point": [self.point]}
        return "".join(f" {name} {value}" for name, values in options.items() for value in values if value is not None)


class VectorFile(NamedTuple):
    """Vectors of a file at our hook points."""

    vectors: dict[tuple[PointName, int], Vector]
    """Float32 vectors by hook point and layer."""
    model: str | None
    provenance: dict[str, str]


class _Entry(NamedTuple):
    """A vector of a file, with the number of its layer or its site, as far as the file has them."""

    name: str
    vector: Any
    number: int | None = None
    site: tuple[PointName, int] | None = None


class _Found(NamedTuple):
    formats: tuple[str, ...]
    """Formats that the content can have."""
    entries: list[_Entry]
    model: object = None
    about: Mapping[str, object] = {}


def read_vectors(
    data: bytes | Container,
    choice: Choice = Choice(),  # noqa: B008 - immutable
    command: str = CONVERT,
) -> VectorFile:
    """Return the vectors of a file of another tool.

    Args:
        data: Content of the file, or the opened file. Its kind is recognised by the first bytes, its format by keys and
            names.
        choice: What the file does not tell, or which of its layers to take.
        command: The command that converts the file, for errors.

    Raises:
        SteeringError: The file is damaged or not a vector file, or does not tell where its vectors belong; or an
            argument has another type.
    """
    if not isinstance(data, (bytes, Container)):
        raise SteeringError("data", f"must be the content of a file, as of Path(...).read_bytes(), not {shown(data)}")
    if not isinstance(choice.layers, (tuple, list)):
        raise SteeringError("layers", f"must be a tuple of layers such as (13,), not {shown(choice.layers)}")
    found = _find(open_container(data) if isinstance(data, bytes) else data)
    name = _choose(found.formats, choice, command)
    vectors: dict[tuple[PointName, int], Vector] = {}
    for entry in _placed(found.entries, name, choice, command):
        if entry.site is None or not 0 <= entry.site[1] < MAX_LAYERS:
            raise SteeringError(f"file.{shown(entry.name)}", f"has no layer here: {FORMATS[name].numbering}")
        if entry.site in vectors:
            raise SteeringError(f"file.{shown(entry.name)}", f"is a second vector at {entry.site}; remove one of them")
        vectors[entry.site] = parse_vector(_single_row(entry.vector), f"file.{shown(entry.name)}")
    about = {"format": name, "numbering": FORMATS[name].numbering, **found.about}
    if given := str(choice).strip():
        about["given"] = given
    texts = {key: value if isinstance(value, str) else shown(value) for key, value in about.items()}
    return VectorFile(vectors, found.model if isinstance(found.model, str) else None, texts)


def _choose(formats: tuple[str, ...], choice: Choice, command: str) -> str:
    given = choice.format
    if given is not None and read_choice(given, FORMATS, "format", what="a format") not in formats:
        raise SteeringError("format", f"{given} does not fit the file, which has the content of {' or '.join(formats)}")
    if given is None and len(formats) > 1:
        meanings = ", or ".join(f"{name}: {FORMATS[name].numbering}" for name in formats)
        advice = f"choose with {command} --format FORMAT{choice} (FORMAT: {' or '.join(formats)})"
        raise SteeringError("file", f"can mean several things ({meanings}); {advice}")
    return given or formats[0]


def _placed(entries: list[_Entry], name: str, choice: Choice, command: str) -> list[_Entry]:
    """Return the entries with their sites; if layers are chosen, only the entries of these layers."""
    form, layers = FORMATS[name], choice.layers
    point = None if choice.point is None else read_point(choice.point, "point")
    named = {form.point} if form.point else {entry.site[0] for entry in entries if entry.site}
    _check_told(name, choice, point, named, command)
    at = form.point or point
    if name == "vector":
        placed = [entry._replace(number=layers[0]) for entry in entries]
    else:
        placed = entries[1:-1] if name == "hidden-states" else entries
    placed = [
        entry._replace(site=(at, entry.number + form.offset)) if at and entry.number is not None else entry
        for entry in placed
    ]
    has = {entry.site[1] for entry in placed if entry.site}
    if missing := [layer for layer in layers if layer not in has]:
        raise SteeringError("layer", f"{missing[0]} is not in the file, which has {shown(sorted(has))}")
    return [entry for entry in placed if not layers or (entry.site and entry.site[1] in layers)]


def _check_told(name: str, choice: Choice, point: PointName | None, named: set[PointName], command: str) -> None:
    """Raise SteeringError unless file and user together tell layers and hook point, and do not differ."""
    form, layers = FORMATS[name], choice.layers
    for layer in layers:
        read_integer(layer, 0, MAX_LAYERS - 1, "layer")
    needed = " --layer N" * (form.needs_layer and not layers)
    needed += " --point POINT" * (not (named or point))
    if needed:
        points = f" (POINT: {' or '.join(POINT_NAMES)})" * (not (named or point))
        advice = f"tell it with {command}{choice}{needed}{points}"
        raise SteeringError("file", f"has the format {name}: {form.numbering}; {advice}")
    if named and point and named != {point}:
        raise SteeringError("point", f"is {point}, but the file has {' and '.join(sorted(named))}; omit it")
    if name == "vector" and len(layers) > 1:
        raise SteeringError("layer", f"names {len(layers)} layers, but the file has one vector; give one layer")


def _single_row(vector: Any) -> Any:
    """Return a vector without a leading axis of one row."""
    has_rows = isinstance(vector, (list, np.ndarray)) and len(vector) == 1 and isinstance(vector[0], (list, np.ndarray))
    return vector[0] if has_rows else vector


def _find(container: Container) -> _Found:
    """Return what a file can be."""
    content = container.content
    if container.kind == "gguf":
        return _find_gguf(container)
    if container.kind == "json":
        return _find_json(content)
    if isinstance(content, dict) and len(content) == 1 and not re.search(r"[0-9]|W_|w_|weight", next(iter(content))):
        content = next(iter(content.values()))
    if isinstance(content, np.ndarray):
        return _find_array(content)
    if not content:
        raise SteeringError("file", "has no tensors")
    if _SAE_TENSORS & content.keys():
        raise SteeringError("file", "is a sparse autoencoder; start the server with --steering-sae NAME=FOLDER")
    if all(_NUMBER.fullmatch(name) for name in content):
        return _Found(("layers",), [_Entry(name, value, int(name)) for name, value in content.items()])
    return _Found(("sites",), [_Entry(name, value, site=_site(name, name)) for name, value in content.items()])


def _find_array(array: np.ndarray) -> _Found:
    if array.ndim == 1 or (array.ndim == 2 and len(array) == 1):
        return _Found(("vector",), [_Entry("vector", array)])
    if array.ndim != 2 or len(array) > MAX_LAYERS + 1:
        expected = "a vector is [H], vectors of layers are [layers, H]"
        raise SteeringError("file", f"has a tensor of shape {shown(list(array.shape))}; {expected}")
    rows = [_Entry(f"row {number}", row, number) for number, row in enumerate(array)]
    return _Found(("hidden-states", "rows"), rows)


def _site(name: object, field: object) -> tuple[PointName, int]:
    """Return the site that a name means exactly."""
    foreign = find_foreign_site(name) if isinstance(name, str) else None
    if foreign is not None and not foreign.name.accepted:
        raise SteeringError(f"file.{shown(field)}", f"{shown(name)} {foreign.problem}")
    try:
        return site(str(name))
    except SteeringError as error:
        problem = error.problem
    try:
        site(str(name).partition(".")[2])
        problem = f"{shown(name)} is a tensor of a module's file; register the file as it is, with register_file"
    except SteeringError:
        pass
    raise SteeringError(f"file.{shown(field)}", problem)


def _find_gguf(container: Container) -> _Found:
    values = {key: value for key, (_, value) in container.fields.items()}
    if extended := next((key for key in values if key.startswith("glp.")), None):
        raise SteeringError(f"file.{shown(extended)}", "is of an extension of control vectors that is not supported")
    entries = []
    for name, vector in container.content.items():
        if (match := _DIRECTION.fullmatch(name)) is None:
            raise SteeringError(f"file.{shown(name)}", "is not the direction of a layer; expected direction.N")
        entries.append(_Entry(name, vector, int(match[1])))
    kind = container.fields.get(_LAYER_COUNT, ("UINT32",))[0]
    if kind not in _UNSIGNED | _SIGNED:
        raise SteeringError(f"file.{_LAYER_COUNT}", f"is of the type {kind}; expected an integer")
    formats = ("control-vector", "cvector-generator") if kind in _SIGNED else ("control-vector",)
    return _Found(formats, entries, values.get("controlvector.model_hint"))


def _find_json(content: Mapping[str, Any]) -> _Found:
    if isinstance(directions := content.get("directions"), dict) and directions:
        for name, value in directions.items():
            if not _NUMBER.fullmatch(name):
                raise SteeringError(f"file.directions.{shown(name)}", "is not the number of a layer")
            if isinstance(value, list) and len(value) > 1 and isinstance(value[0], list):
                problem = f"has {len(value)} rows, whose meaning is not in the file; only one is read"
                raise SteeringError(f"file.directions.{name}", problem)
        entries = [_Entry(f"directions.{name}", value, int(name)) for name, value in directions.items()]
        return _Found(("svec",), entries, content.get("model_type"))
    hooks, layer = {"hookName": content.get("hookName")}, content.get("layerNumber")
    if "hookType" in content:
        hooks["hookType"] = f"blocks.{shown(layer)}.{content['hookType']}"
    sites = [_site(hook, field) for field, hook in hooks.items() if hook is not None]
    vectors = [content[key] for key in ("values", "vector") if content.get(key)]
    if not sites or not vectors:
        keys = ", ".join(map(shown, list(content)[:5]))
        raise SteeringError("file", f"is JSON with the keys {keys}, by which no format of vectors is recognised")
    if len(vectors) > 1:
        raise SteeringError("file", "has values and vector; remove one of them")
    if not (layer is None or is_integer(layer)):
        raise SteeringError("file.layerNumber", f"must be the number of a layer, not {shown(layer)}")
    if sites[0] != sites[-1] or layer not in (None, sites[0][1]):
        raise SteeringError("file.hookName", f"{shown(hooks['hookName'])} is another site than hookType or layerNumber")
    named = {
        "label": content.get("label", content.get("vectorLabel")),
        "default_strength": content.get("defaultSteerStrength", content.get("vectorDefaultSteerStrength")),
    }
    about = {key: value for key, value in named.items() if value is not None}
    return _Found(("neuronpedia",), [_Entry("vector", vectors[0], site=sites[0])], content.get("modelId"), about)
