# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package: its folders and top modules, from high to low, each with what it contains."""

from __future__ import annotations

from typing import Final, NamedTuple


class Room(NamedTuple):
    """Modules and folders of one level.

    A module imports its own folder and the rooms below it. Modules of one level do not import each other.
    """

    names: tuple[str, ...]
    contents: str


def _room(names: str, contents: str) -> Room:
    return Room(tuple(names.split()), contents)


ROOMS: Final = (
    _room("cli", "the command `vllm-steer`"),
    _room("testing", "what users run to check their own models: random requests (`fuzz`) and proofs (`prove`)"),
    _room("peers", "interfaces of other projects, over the public API"),
    _room("adapters", "checks and names that interfaces of other libraries share"),
    _room("client", "client of a server with steering"),
    _room("server", "routes, middleware, responses, keys and quotas"),
    _room("studio", "page in the browser: its files and the routes that serve them"),
    _room("lab", "directions from examples, their doses, probes"),
    _room("patching", "studies: activation patching over prompts, sites and tokens"),
    _room("plugin", "entry point of vLLM's plugins, and what runs around vLLM's front end"),
    _room("llm async_llm", "`LLM` and `AsyncLLM` with steering"),
    _room("frontend", "checks before the engine, captured rows on outputs"),
    _room("registry", "named modules and global steering"),
    _room("vectors", "vector files of other tools"),
    _room("engine", "scheduler, worker, runners, cache keys, rows that leave the worker"),
    _room("audit", "log of who changed what"),
    _room("capture", "captured rows and readouts, consumers, capture files and their reader"),
    _room("metrics", "Prometheus metrics"),
    _room("models", "hook points of each decoder-layer class, and their proofs"),
    _room("taps", "code at a hook point: definition in torch, Triton kernel, device tables"),
    _room("params", "`SamplingParams` with steering"),
    _room("program", "compiled, content-addressed form of a request"),
    _room("config", "`SteeringConfig`"),
    _room("settings", "table of settings: keys of `SteeringConfig`, flags, environment variables"),
    _room("request", "fields of a request as types: checks, wire form, JSON Schema"),
    _room("site_names", "names of sites"),
    _room("points log fs limits", "hook points, log, files, default limits"),
    _room("compat", "all uses of vLLM's internals (*seams*), wraps, checks of version and settings"),
    _room("lazy", "imports at first use"),
    _room("_version errors", "version, errors, optional packages"),
)
