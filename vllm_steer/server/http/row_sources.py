# SPDX-License-Identifier: Apache-2.0
"""Vectors of edits that a request names instead of sending: stored captures, for ``replace``, and those of modules.

A module is named by an edit, which takes its vector or one of its probes, or by an expression, which takes its vectors.

They are resolved before the fields are compiled, so program, cache keys and quotas are the same as if the request had
sent the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from vllm_steer.capture.files.reader import StoredRequest, open_captures
from vllm_steer.capture.results import SiteRows
from vllm_steer.errors import SteeringError
from vllm_steer.params import CAPTURE_FIELD
from vllm_steer.registry.composer import find_vector
from vllm_steer.registry.errors import RegistryUnavailableError, UnknownModuleError
from vllm_steer.registry.expression import Expression
from vllm_steer.registry.snapshot import Snapshot
from vllm_steer.request import Edit
from vllm_steer.request.capture_source import ModuleRowsForm, StoredRowsForm, names_rows
from vllm_steer.request.edit_fields import GENERAL_FIELD
from vllm_steer.request.references import Reference
from vllm_steer.request.scalars import MASK_HINT, did_you_mean, is_integer, shown
from vllm_steer.request.selector import Selector
from vllm_steer.server.auth.current_key import require
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.capture_store import CaptureStore
from vllm_steer.server.http.request_context import RequestContext

STORE = "store"
"""Option of the capture consumer ``memory`` over HTTP: keep the rows on the server, whatever their size."""
_CAPTURE, _MODULE = StoredRowsForm.__struct_fields__[0], ModuleRowsForm.__struct_fields__[0]
_FAR = 1 << 30
"""Length of a prompt in which no position counted from its start is one counted from its end."""
_GONE = "no such capture: it has expired, was deleted, or never existed"


def take_store_option(fields: Mapping[str, Any], consumer: str) -> tuple[Mapping[str, Any], bool]:
    """Return ``fields`` without the option ``store`` of a consumer's capture, and its value.

    Raises:
        SteeringError: The option is not a boolean.
    """
    capture = fields.get(CAPTURE_FIELD)
    if not isinstance(capture, Mapping):
        return fields, False
    spec = capture.get(consumer)
    if not isinstance(spec, Mapping) or STORE not in spec:
        return fields, False
    store = spec[STORE]
    if not isinstance(store, bool):
        raise SteeringError(f"{CAPTURE_FIELD}.{consumer}.{STORE}", f"must be true or false, not {shown(store)}")
    rest = {name: value for name, value in spec.items() if name != STORE}
    return {**fields, CAPTURE_FIELD: {**capture, consumer: rest}}, store


def with_rows(fields: Mapping[str, Any], context: RequestContext) -> Mapping[str, Any]:
    """Return ``fields`` with the vectors in place of their names, and with the edits of an expression.

    Raises:
        SteeringError: A capture or a module is gone, or lacks the site, a position or the probe; or an expression
            cannot be read, or names a module that does not tell the length of the stream.
        AccessError: The key has no right to read captures.
    """
    edits = fields.get(GENERAL_FIELD)
    if isinstance(edits, str):
        return {**fields, GENERAL_FIELD: _edits_of(edits, context)}
    if not isinstance(edits, (list, tuple)) or not any(map(_is_named, edits)):
        return fields
    opened: dict[str, StoredRequest] = {}
    resolved = [
        {**edit, "vector": _resolve(edit, f"{GENERAL_FIELD}[{i}].vector", context, opened)} if _is_named(edit) else edit
        for i, edit in enumerate(edits)
    ]
    return {**fields, GENERAL_FIELD: resolved}


def _is_named(edit: object) -> bool:
    return isinstance(edit, Mapping) and names_rows(edit.get("vector"))


def _resolve(edit: Mapping[str, Any], field: str, context: RequestContext, opened: dict[str, StoredRequest]) -> Any:
    source: Mapping[str, Any] = edit["vector"]
    kind = shown(edit.get("kind"))
    if _CAPTURE in source and edit.get("kind") != "replace":
        raise SteeringError(field, f"refers to rows stored on the server; only replace takes stored rows, not {kind}")
    form = StoredRowsForm if _CAPTURE in source else ModuleRowsForm
    for name in source:
        if name not in form.__struct_fields__:
            hint = did_you_mean(name, form.__struct_fields__, {})
            raise SteeringError(field, f"unknown key {shown(name)}; use {', '.join(form.__struct_fields__)}{hint}")
    if _MODULE in source:
        path, dosed = f"{field}.{_MODULE}", edit.get("dose") is not None
        return find_vector(source[_MODULE], _snapshot(context, path), path, dosed=dosed)
    require(Right.CAPTURE)
    name = source[_CAPTURE]
    if not isinstance(name, str):
        raise SteeringError(f"{field}.{_CAPTURE}", f"must be the id of a stored capture, not {shown(name)}")
    if name not in opened:
        opened[name] = _open(name, context, f"{field}.{_CAPTURE}")
    chosen = None
    if source.get("positions") is not None:
        tokens_field = f"{field.rpartition('.')[0]}.tokens"
        chosen = _pair(source["positions"], edit.get("tokens"), f"{field}.positions", tokens_field, opened[name])
    return StoredRows(opened[name], chosen)


def _snapshot(context: RequestContext, field: str) -> Snapshot:
    if context.snapshot is not None:
        return context.snapshot
    if context.engine is None:
        problem = "cannot be read on this route, which knows no engine; use /v1/completions, or send the rows"
        raise SteeringError(field, problem)
    return context.engine.registry.snapshot()


def _edits_of(text: str, context: RequestContext) -> list[Edit]:
    """Return the edits of an expression, whose names are registered modules."""
    snapshot = _snapshot(context, GENERAL_FIELD)
    try:
        expression = Expression.parse(text)
        found = {term.name: snapshot.find(Reference(term.name, None), GENERAL_FIELD)[1] for term in expression.terms}
        contents = {name: snapshot.content(version.digest) for name, version in found.items()}
        expression.check_count({name: len(module.base) for name, module in contents.items()})
        return expression.edits({name: snapshot.directions(found[name], name, GENERAL_FIELD) for name in found})
    except (RegistryUnavailableError, UnknownModuleError):  # which have an HTTP status, or more to say
        raise
    except SteeringError as error:
        raise SteeringError(GENERAL_FIELD, error.problem) from None


def _open(capture_id: str, context: RequestContext, field: str) -> StoredRequest:
    store: CaptureStore | None = None if context.capture_store is None else context.capture_store()
    if store is None:
        raise SteeringError(field, "cannot be read here: a batch run stores no captures; send the rows")
    capture = store.open(capture_id, context.owner)
    if capture is None:
        raise SteeringError(field, f"{_GONE}; capture the rows again")
    with capture.file:
        if capture.format != "safetensors":
            raise SteeringError(field, "this capture went to a consumer that keeps no rows; capture with `memory`")
        try:
            (request,) = open_captures(capture.file.name)
            for site in request.sites:
                request.tensor(*site)  # maps the file, so that it can expire while it is read
        except FileNotFoundError:
            raise SteeringError(field, f"{_GONE}; capture the rows again") from None
    return request


def _pair(positions: object, tokens: object, field: str, tokens_field: str, request: StoredRequest) -> list[int]:
    """Return the captured position whose row each of ``tokens`` takes, in their order."""
    if not isinstance(positions, (list, tuple)) or not positions or not all(map(is_integer, positions)):
        raise SteeringError(field, f"must be a list of positions in the captured prompt, not {shown(positions)}")
    if len(positions) > 2 and set(positions) == {0, 1}:
        raise SteeringError(field, f"{shown(list(positions))} repeats positions; {MASK_HINT}")
    # Counted before any position is listed: an interval of a short body can have two billion of them.
    intervals = Selector.parse("all" if tokens is None else tokens, tokens_field).intervals(_FAR, tokens_field)
    if (count := sum(stop - start for start, stop in intervals)) >= _FAR // 2:
        raise SteeringError(
            field,
            "is matched with `tokens` one by one, so `tokens` must name as many positions in every prompt: last_prompt "
            f'or a list such as [3, 4], [-1] or {{"generated": [0]}}, not {shown(tokens)}',
        )
    if count != len(positions):
        raise SteeringError(field, f"has {len(positions)} positions for {count} tokens; give one for each token")
    length = request.num_prompt_tokens
    for position in positions:
        if position < -length:  # later positions may be captured tokens of the answer
            raise SteeringError(field, f"position {position} is outside of the captured prompt of {length} tokens")
    return [int(position) + (length if position < 0 else 0) for position in positions]


class StoredRows:
    """Rows of a stored capture, in the form that ``Edit`` takes as a vector."""

    status: str = "ok"
    error: str | None = None

    def __init__(self, request: StoredRequest, chosen: Sequence[int] | None) -> None:
        """Create the source.

        Args:
            request: The capture.
            chosen: Captured positions, one for each of the edit's tokens; None if they are the same.
        """
        self.data = request
        self.paired = chosen is not None
        self._sites = _Sites(request, chosen)
        if request.status != "ok":
            self.status, self.error = request.status, request.error

    @property
    def sites(self) -> Mapping[tuple[str, int], SiteRows]:
        """Rows by point and layer."""
        return self._sites


class _Sites(Mapping[tuple[str, int], SiteRows]):
    """Rows by point and layer, which are read when they are used."""

    def __init__(self, request: StoredRequest, chosen: Sequence[int] | None) -> None:
        self._request, self._chosen = request, chosen
        self._read = lru_cache(maxsize=1)(self._read_site)

    def __getitem__(self, site: tuple[str, int]) -> SiteRows:
        if site not in self._request.sites:
            raise KeyError(site)
        return self._read(site)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._request.sites)

    def __len__(self) -> int:
        return len(self._request.sites)

    def _read_site(self, site: tuple[str, int]) -> SiteRows:
        rows, positions = self._request.tensor(*site), self._request.positions(*site)
        if self._chosen is None:
            return SiteRows(positions.numpy(), rows)
        place = {position: i for i, position in enumerate(positions.tolist())}
        if len(rows) != len(positions):
            raise SteeringError("vector.positions", "has no effect on a reduced capture, which has one row; omit it")
        lost = [position for position in self._chosen if position not in place]
        if lost:
            raise SteeringError("vector.positions", f"position {lost[0]} was not captured; capture it, or omit it")
        return SiteRows(torch.tensor(self._chosen).numpy(), rows[[place[position] for position in self._chosen]])
