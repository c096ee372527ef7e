# SPDX-License-Identifier: Apache-2.0
"""All limits: name, default, range and meaning of each.

They are rows of :data:`vllm_steer.settings.SETTINGS`. Key files and ``vllm-steer doctor`` derive from them as well:

* :data:`ENGINE_LIMITS` size the tables of an engine; users set them in ``steering_config`` or by flags.
* :data:`SERVER_LIMITS` protect a server; users set them by flags, and per API key in the key file.
* :data:`FORMAT_LIMITS` bound what one request may contain; they are fixed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Literal

Scope = Literal["request", "key", "server"]

MAX_SEGMENTS = 1024
"""Upper bound of the engine limit ``max_segments``."""
MAX_BOUNDARIES = 2 * MAX_SEGMENTS
"""Positions at which the selectors of one request may begin or end. Equal edits that follow one another share a
segment, so a request within ``max_segments`` can have more boundaries than segments."""
MAX_TOTAL_CONDITIONS = 256
"""Upper bound of the engine limit ``max_conditions``."""


@dataclass(frozen=True, eq=False)
class Limit:
    """An integer setting with a default and an inclusive range."""

    name: str
    default: int
    low: int
    high: int
    help: str

    of_engine = False

    @property
    def flag(self) -> str:
        """The server flag that sets the limit."""
        return f"--{self.dest.replace('_', '-')}"

    @property
    def dest(self) -> str:
        """The name of the flag among the parsed arguments."""
        return f"steering_{self.name}"

    @property
    def text(self) -> str:
        """The help of the flag."""
        return f"{self.help[0].upper()}{self.help[1:]}. {self.low} to {self.high}, default {self.default}."

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of ``add_argument``."""
        return {"type": self._read, "metavar": "N"}

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a value, or None."""
        known = isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high
        return None if known else f"must be {self.low} to {self.high}"

    def _read(self, text: str) -> int:
        if text.isascii() and text.isdecimal() and self.problem(int(text[:20])) is None:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be an integer from {self.low} to {self.high}, not {text!r}")


@dataclass(frozen=True, eq=False)
class EngineLimit(Limit):
    """A limit that is fixed when the engine starts; ``name`` is its field of ``SteeringConfig``."""

    of_engine = True

    @property
    def how_to_raise(self) -> str:
        """How to start an engine with a higher limit, as part of an error message."""
        return f"raise it with {self.flag} or SteeringConfig({self.name}=...)"


@dataclass(frozen=True, eq=False)
class ServerLimit(Limit):
    """A limit that the server enforces before a request reaches the engine."""

    prefix: Literal["steering", "capture"] = "steering"
    """The first word of its flag."""
    scope: Scope = "request"
    """Scope of the count: one request, all requests in flight of one API key, or the whole server."""
    status: HTTPStatus | None = None
    """Status of the response to a request that exceeds it; None if the request is served as ``help`` describes."""

    @property
    def dest(self) -> str:
        """The name of the flag among the parsed arguments."""
        return f"{self.prefix}_{self.name}"

    @property
    def key_name(self) -> str | None:
        """Its name in the limits of an API key; None if keys cannot have their own value."""
        return f"{self.prefix}_{self.name.removeprefix('key_')}" if self.scope == "key" else None


@dataclass(frozen=True)
class FormatLimit:
    """A fixed bound on the content of one request."""

    name: str
    value: int
    help: str


_TOO_LARGE, _TOO_MANY = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.TOO_MANY_REQUESTS

# fmt: off
ENGINE_LIMITS: Mapping[str, EngineLimit] = MappingProxyType(
    {
        limit.name: limit
        for limit in (
            EngineLimit("max_rows", 1024, 1, 1 << 16,
                "table rows on the device at one time, over all running requests: distinct sets of edits and captures "
                "that apply to one token"),
            EngineLimit("max_vectors", 2048, 1, 1 << 20,
                "distinct vectors (of edits) and directions (of projections) on the device at one time; each takes "
                "4 x hidden size bytes"),
            EngineLimit("max_instructions", 65536, 1, 1 << 24,
                "instructions on the device at one time: one per table row, site and edit or capture"),
            EngineLimit("max_matrix_rows", 65536, 1, 1 << 24,
                "positions of matrices (edits with one row per position) on the device at one time, gaps between "
                "positions included; each takes 4 bytes, and 4 more per direction of a subspace"),
            EngineLimit("max_segments", 32, 1, MAX_SEGMENTS,
                "token segments of one request: stretches of positions with the same edits and captures; a matrix "
                "counts as one"),
            EngineLimit("capture_rows", 14336, 1, 1 << 24,
                "captured rows of one engine step; each takes hidden size x bytes of the dtype"),
            EngineLimit("graph_sets", 3, 1, 64,
                "sets of CUDA graphs that launch different taps; each step runs the smallest set that covers its "
                "edits and captures. 1: all taps; 2: also no taps; 3: also pre_attn and post_block; 4: also the other "
                "points; above 4: also ranges of layers"),
            EngineLimit("record_columns", 32, 4, 1024,
                "numbers that one token records: one per probe or direction of its readouts, 2 x `top_k` (or given "
                "tokens) per layer of `lens` and `sae`, one per distinct `when`, one per name in `live`, and one "
                "per distinct part of the output; each takes 4 bytes for each token of a step"),
            EngineLimit("max_conditions", 16, 1, MAX_TOTAL_CONDITIONS,
                "conditions of one request, in `when` of its edits and in `stop_on`, and one for each part of the "
                "output that it selects, two for `answer` if tool calls are known; equal ones count once"),
            EngineLimit(
                "capture_mib", 4096, 1, 1 << 24, "captured rows of all running requests together, in MiB of host memory"
            ),
            EngineLimit("queue_timeout", 600, 0, 1 << 24,
                "seconds that a request may wait for room in the tables or for captured rows before it fails; 0 for no "
                "limit"),
        )
    }
)

MAX_BODY_MIB = ServerLimit("max_body_mib", 64, 1, 1 << 16,
    "size of an HTTP body with steering or capture fields, in MiB",
    status=_TOO_LARGE)
REQUEST_EDITS = ServerLimit("request_edits", 1024, 1, 1 << 20,
    "edits of one request, including the edits of its modules; its own fields may contain 4,096",
    status=_TOO_LARGE)
REQUEST_VECTORS = ServerLimit("request_vectors", 1024, 1, 1 << 20,
    "distinct vectors and directions of one request, including those of modules",
    status=_TOO_LARGE)
REQUEST_LAYERS = ServerLimit("request_layers", 4096, 1, 1 << 16,
    "distinct layers that one request edits, captures or reads; binds only below 4,096, which requests can name",
    status=_TOO_LARGE)
MAX_NORM = ServerLimit("max_norm", 0, 0, 1 << 24,
    "norm that an edit of a request, a module or global steering may add to a row; 0 for no limit. A live strength "
    "counts as a part of the strength and is checked with each change. `add`: strength x "
    "norm of the vector; `replace`: strength x norm of the row, or of its component in the subspace; `clamp`: the "
    "larger bound (times a strength above 1); `feature`: strength x (`set` or `add`) x norm of the decoder direction. "
    "`add_normed` and `ablate` scale with the row itself and are not limited",
    status=HTTPStatus.BAD_REQUEST)
KEY_REQUESTS = ServerLimit("key_requests", 256, 1, 1 << 20,
    "HTTP requests of a key in flight",
    scope="key", status=_TOO_MANY)
KEY_PROGRAMS = ServerLimit("key_programs", 128, 1, 1 << 20,
    "distinct programs (edits and captures) of a key in flight",
    scope="key", status=_TOO_MANY)
KEY_POOL_MIB = ServerLimit("key_pool_mib", 256, 1, 1 << 20,
    "distinct vectors and directions of a key in flight, as float32, in MiB",
    scope="key", status=_TOO_MANY)
KEY_CAPTURE_MIB = ServerLimit("key_mib", 1024, 1, 1 << 24,
    "captured rows that a key's requests in flight may produce until they end, in MiB",
    prefix="capture", scope="key", status=_TOO_MANY)
KEY_STORE_MIB = ServerLimit("key_store_mib", 512, 0, 1 << 20,
    "captured rows of a key that are stored for download, in MiB",
    prefix="capture", scope="key", status=_TOO_MANY)
KEY_STUDY_RUNS = ServerLimit("key_study_runs", 65536, 1, 1 << 24,
    "forward passes of the cells of one patching study: one per cell, or several if answer or foil have several tokens",
    scope="key", status=_TOO_LARGE)
KEY_STUDIES = ServerLimit("key_studies", 2, 1, 1 << 10,
    "patching studies of a key at one time",
    scope="key", status=_TOO_MANY)
MAX_STUDIES = ServerLimit("max_studies", 16, 1, 1 << 10,
    "patching studies of all keys at one time",
    scope="server", status=HTTPStatus.SERVICE_UNAVAILABLE)
MAX_PROGRAMS = ServerLimit("max_programs", 4096, 1, 1 << 24,
    "distinct programs of all requests in flight",
    scope="server", status=HTTPStatus.SERVICE_UNAVAILABLE)
INLINE_KIB = ServerLimit("inline_kib", 1024, 0, 1 << 20,
    "captured rows of one choice that are returned inside the response, in KiB; larger captures go to /v1/captures",
    prefix="capture")
RESPONSE_MIB = ServerLimit("response_mib", 64, 0, 1 << 20,
    "captured rows of all choices that are returned inside one response, in MiB; larger captures go to /v1/captures",
    prefix="capture")
STORE_MIB = ServerLimit("store_mib", 1024, 0, 1 << 20,
    "captured rows stored for download from /v1/captures, in MiB; beyond it, a response reports that its rows could "
    "not be stored",
    prefix="capture", scope="server")
EXPIRY_S = ServerLimit("expiry_s", 300, 1, 86400,
    "seconds for which captured rows are stored for download",
    prefix="capture", scope="server")
REGISTRY_MODULES = ServerLimit("registry_modules", 4096, 1, 1 << 20,
    "names of registered modules",
    scope="server", status=HTTPStatus.INSUFFICIENT_STORAGE)
REGISTRY_MIB = ServerLimit("registry_mib", 1024, 1, 1 << 20,
    "vectors of all registered modules and their versions, in MiB; every server process holds them in memory",
    scope="server", status=HTTPStatus.INSUFFICIENT_STORAGE)
# fmt: on

SERVER_LIMITS: tuple[ServerLimit, ...] = (
    MAX_BODY_MIB, REQUEST_EDITS, REQUEST_VECTORS, REQUEST_LAYERS, MAX_NORM,
    KEY_REQUESTS, KEY_PROGRAMS, KEY_POOL_MIB, KEY_CAPTURE_MIB, KEY_STORE_MIB, KEY_STUDY_RUNS, KEY_STUDIES,
    MAX_PROGRAMS, MAX_STUDIES, INLINE_KIB, RESPONSE_MIB, STORE_MIB, EXPIRY_S, REGISTRY_MODULES, REGISTRY_MIB,
)  # fmt: skip
KEY_LIMITS: Mapping[str, ServerLimit] = MappingProxyType(
    {limit.key_name: limit for limit in SERVER_LIMITS if limit.key_name is not None}
)
"""Limits that an API key may have its own value of, by their names in the key file."""

_format_limits: list[FormatLimit] = []


def _most(name: str, value: int, help: str) -> int:
    """Return ``value``, which becomes a row of `FORMAT_LIMITS`."""
    _format_limits.append(FormatLimit(name, value, help))
    return value


MAX_EDITS = _most("edits", 4096, "edits in the fields of one request")
MAX_LAYERS = _most("layers", 4096, "layers that can be named: 0 to 4095")
MAX_WIDTH = _most("width", 65536, "components of a vector")
MAX_SELECTOR_ITEMS = _most("selector items", 65536, "positions and [start, stop) pairs in one list")
MAX_LISTED = _most("listed", 1 << 20, "positions, pairs and layers in all lists of one request together")
MAX_NAMES = _most("names", 1024, "names that vLLM does not know in one object of a body, and in `vllm_xargs`")
MAX_NAME_CHARS = _most("name characters", 65536, "characters of all these names together")
MAX_REFERENCES = _most("modules", 64, "names in `steering_modules`")
MAX_CONSUMERS = _most("consumers", 16, "consumers in `capture`")
MAX_OPTIONS_CHARS = _most("options", 16384, "characters of JSON in the options of one consumer")
MAX_OPTIONS_DEPTH = _most("options depth", 8, "levels of nesting in these options")
MAX_JSON_VALUES = _most(
    "JSON values", 1 << 19, "objects, lists and texts in a JSON file or in a body under `/v1/steering`"
)
MAX_DIRECTIONS = _most("directions", 1024, "directions or probes of one projection")
MAX_DOSE = _most("dose", 1000, "median lengths of the stream that a dose may add, in either direction")
MAX_COMPONENTS = _most("projection components", 1 << 22, "components of all directions of one projection")
MAX_MATRIX_COMPONENTS = _most("matrix components", 1 << 25, "components of all rows of a matrix of `replace`")
MAX_SUBSPACE = _most("subspace", 64, "directions in `subspace` of an edit")
MAX_ENGINE_DIRECTIONS = _most(
    "engine directions",
    256,
    "directions of a projection that the engine computes; larger projections are computed where the rows arrive",
)
MAX_READOUTS = _most("readouts", 256, "names in `readouts`")
MAX_CONDITIONS = _most("conditions", 16, "conditions in `when` of one edit")
MAX_STOPS = _most("stops", 16, "conditions in `stop_on`")
MAX_STOP_TOKENS = _most("stop tokens", 1024, "`tokens` of a condition in `stop_on`")
MAX_PROBE_WIDTH = _most("hidden units", 256, "hidden units of a probe")
MAX_TOP_K = _most("top k", 64, "`top_k` of a readout `lens` or `sae`, and `tokens` of a `lens`")
MAX_SAES = _most("autoencoders", 64, "sparse autoencoders of an engine")
MAX_CONTROLLED = _most("controlled samples", 1024, "samples that a controller steers at one time, in one process")
MAX_SAE_FEATURES = _most("features", 1 << 22, "features of a sparse autoencoder")
MAX_STUDY_PAIRS = _most("study pairs", 16384, "`pairs` of a patching study, and prompts in its `reference`")
MAX_STUDY_POSITIONS = _most(
    "study positions", 1 << 22, "positions of all columns and all pairs of a patching study together"
)
MAX_STRENGTHS_BYTES = _most("strengths", 65536, "bytes of a change of live strengths over HTTP")
MAX_EXPRESSION_CHARS = 4096
MAX_EXPRESSION_EDITS = 256
FORMAT_LIMITS = tuple(_format_limits)
