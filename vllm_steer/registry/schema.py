# SPDX-License-Identifier: Apache-2.0
"""What is said about modules and global steering, in Python, in HTTP answers and in the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, populate_by_name=True)


class ModuleUse(_Answer):
    """A module as it is applied."""

    name: str | None
    """Its name, or null where it was referred to by digest alone."""
    digest: str
    """`sha256:` and the hash of its content."""
    scale: float
    """What the strength of each of its edits is multiplied by."""


class SteeringApplied(_Answer):
    """What was applied to one request: first global steering, then modules in order, then the request's own edits."""

    epoch: int
    """State of the registry with which the request was admitted; every change of it counts one up."""
    global_steering: str | None = Field(alias="global")
    """Digest of the global steering, or null where there was none."""
    modules: tuple[ModuleUse, ...]
    """The modules that the request named."""
    request: str | None
    """Digest of the request's own compiled edits, or null where it brought none."""


class Content(_Answer):
    """Which sites some content edits; the vectors themselves are in `data`, where they were asked for."""

    tiers: dict[str, dict[str, list[int]]]
    """Layers by point by tier: `base` is for every token, `prefill` for prompt tokens, `decode` for generated ones."""
    edits: list[str]
    """Kind and point of each edit beside the tiers, in the order in which they apply."""
    num_bytes: int
    """What the vectors take in float32."""
    data: dict[str, Any] | None = None
    """The whole content, as it can be registered again, with vectors packed; null unless asked for."""


class ModuleInfo(_Answer):
    """What is known of a module's current version, or of the version that was asked for."""

    epoch: int
    """State of the registry of which this is said."""
    name: str
    """What requests call it."""
    digest: str
    """`sha256:` and the hash of the content: edits, vectors and probes, nothing else."""
    versions: list[str]
    """Digests of all versions that can be referred to, oldest first."""
    description: str
    """Free text."""
    model: str | None
    """The model that the vectors were made for; for people to read."""
    provenance: dict[str, str]
    """Where the vectors come from; for people to read."""
    registered: float
    """When this version was registered, in seconds since 1970."""
    width: int
    """Components of each vector."""
    probes: list[str]
    """Names of its probe directions."""
    content: Content
    """What it edits."""
    problem: str | None
    """Why its content cannot be read from the registry's folder, and requests that name it are refused; or null."""


class ModuleList(_Answer):
    """All modules by name."""

    object: Literal["list"] = "list"
    """Always `list`."""
    epoch: int
    """State of the registry of which this is said."""
    data: list[ModuleInfo]
    """The modules, in order of their names."""


class Deleted(_Answer):
    """What was deleted; requests that run with it are not disturbed."""

    epoch: int
    """State of the registry after it."""
    name: str
    """The module."""
    deleted: list[str]
    """Digests of the versions that can no longer be referred to under this name."""


class GlobalSteering(_Answer):
    """What is applied to every request admitted from now on, ahead of what the request itself brings."""

    epoch: int
    """State of the registry; it is part of what each answer says was applied to it."""
    digest: str | None
    """Digest of the whole, or null where nothing is set."""
    modules: list[ModuleUse]
    """Modules that apply first, as they were when they were set: another version registered later changes nothing."""
    content: Content
    """What applies after the modules."""


class ErrorDetail(_Answer):
    """What is wrong, as in OpenAI's answers."""

    message: str
    """The place and the problem, in words."""
    type: str
    """Name of the error, e.g. `BadRequestError`."""
    param: str | None
    """Path of the value that is wrong."""
    code: int
    """The HTTP status."""


class ErrorAnswer(_Answer):
    """An error."""

    error: ErrorDetail
    """The error."""
