# SPDX-License-Identifier: Apache-2.0
"""API objects for modules and global steering, shared by Python, HTTP responses and the OpenAPI document."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_steer.errors import SteeringError
from vllm_steer.registry.metadata import ModuleMetadata
from vllm_steer.request.probe import HiddenLayer, Probe


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, populate_by_name=True)


class ModuleUse(_Answer):
    """A module as it is applied."""

    name: str | None
    """Name of the module, or null if it was referred to by digest alone."""
    digest: str
    """`sha256:` and the hash of the module's content."""
    scale: float
    """Factor on the strength of each of the module's edits."""
    dose: float | None = None
    """Dose of each of the module's vectors, or null if a scale was given."""
    scales: tuple[float, ...] = ()
    """Scale of each of the module's vectors that the dose means, in ascending order of the layers."""


class NoEffect(_Answer):
    """An edit, condition, readout or stop that had no effect."""

    edit: str
    """Path in the request, such as `steering[0]`, `steering[0].when`, `readouts.name` or `stop_on[0]`;
    `steering_modules[i]`, or `global steering`."""
    reason: Literal["unreached", "zero_vector", "zero_strength"]
    """`unreached`: no token of the request was one of its tokens. The others were known from the start."""
    tokens: str | list[int | list[int | None]] | dict[str, Any] | None = None
    """Tokens of which none was reached."""
    choices: tuple[int, ...] | None = None
    """Choices (samples) in which none of the tokens was reached, by index; null for the other reasons."""


class SteeringApplied(_Answer):
    """Steering applied to one request: global steering, then modules in order, then the request's own edits."""

    epoch: int
    """Epoch of the registry at which the request was admitted. Every change increments it."""
    global_steering: str | None = Field(alias="global")
    """Digest of global steering, or null if none was set."""
    modules: tuple[ModuleUse, ...]
    """Modules that the request named."""
    request: str | None
    """Digest of the request's own compiled edits, or null if it had none."""
    doses: dict[str, float] = {}
    """Doses of the request's own edits by path, such as `steering[0]`; an expression has an edit for each layer.
    Omitted from JSON if there are none."""
    no_effect: tuple[NoEffect, ...] = ()
    """Edits, conditions, readouts and stops that had no effect; omitted from JSON if there are none. Unreached ones are
    known when the request has finished: a stream that has any ends with one more event."""


class ProbeInfo(_Answer):
    """How a probe is read. A readout that names the probe takes the registered values; null was not registered."""

    bias: float | None
    """Added to the product."""
    sigmoid: bool | None
    """Whether the score is the sigmoid of the sum."""
    point: str | None
    """Hook point for which the probe was made."""
    layer: int | None
    """Layer for which the probe was made."""
    hidden: int | None
    """Number of hidden units; null for a direction."""

    @classmethod
    def of(cls, probe: Probe) -> ProbeInfo:
        """Return the description of a probe."""
        hidden = len(probe.weights.weights.directions) if isinstance(probe.weights, HiddenLayer) else None
        return cls(bias=probe.bias, sigmoid=probe.sigmoid, point=probe.point, layer=probe.layer, hidden=hidden)


class Content(_Answer):
    """Sites that some content edits. The vectors are in `data` if they were requested."""

    tiers: dict[str, dict[str, list[int]]]
    """Layers by part and point: `base` applies to every token, `prefill` to prompt tokens, `decode` to generated
    tokens."""
    edits: list[str]
    """Kind and point of each edit in `edits`, in the order in which they apply."""
    probes: dict[str, ProbeInfo] = {}
    """Probes by name."""
    num_bytes: int
    """Size of the vectors in float32, in bytes."""
    data: dict[str, Any] | None = None
    """Complete content with packed vectors, in the form in which it can be registered again; null unless requested."""


class StreamLength(_Answer):
    """Length of the stream at a site of a module, by which a dose is converted to a strength."""

    point: str
    """Hook point of the vector."""
    layer: int
    """Layer of the vector."""
    length: float
    """Median norm of the stream, from the module's provenance."""
    strength: float
    """Scale of the module, or strength of an edit with its vector, that a dose of 1 means."""


class ModuleInfo(_Answer):
    """Description of a module's current version, or of the requested version."""

    epoch: int
    """Epoch of the registry that this describes."""
    name: str
    """Name by which requests refer to the module."""
    digest: str
    """`sha256:` and the hash of the content: edits, vectors and probes, without the descriptive metadata."""
    versions: list[str]
    """Digests of all versions that requests can refer to, oldest first."""
    description: str
    """Free text."""
    model: str | None
    """Model that the vectors were computed for; informational."""
    provenance: dict[str, str]
    """Origin of the vectors; informational."""
    registered: float
    """Time at which this version was registered, in seconds since 1970."""
    width: int
    """Size of each vector."""
    probes: list[str]
    """Names of the probes."""
    content: Content
    """Sites that the module edits."""
    streams: list[StreamLength] = []
    """Lengths of the stream at the sites of the module's vectors; empty if its provenance does not tell them, or if it
    has other edits, so that requests cannot give a dose of it."""
    problem: str | None
    """Reason why the content cannot be read from the registry's directory, or null. Requests that name the module are
    then rejected."""

    def save(self, path: str | Path) -> None:
        """Write the module to a safetensors file, from which it can be registered again with the same digest.

        Raises:
            SteeringError: The vectors are missing: get the module with ``data=True``.
        """
        from vllm_steer.registry.module import parse_module
        from vllm_steer.registry.module_files import write_module

        if self.content.data is None:
            raise SteeringError("content.data", "is missing; get the module with data=True")
        about = ModuleMetadata(self.description, self.model, self.provenance)
        Path(path).write_bytes(write_module(parse_module(self.content.data), about))


class ModuleList(_Answer):
    """List of all modules."""

    object: Literal["list"] = "list"
    """Always `list`."""
    epoch: int
    """Epoch of the registry that this describes."""
    data: list[ModuleInfo]
    """Modules, ordered by name."""


class Deleted(_Answer):
    """Result of a deletion. Running requests are not affected."""

    epoch: int
    """Epoch of the registry after the deletion."""
    name: str
    """Name of the module."""
    deleted: list[str]
    """Digests of the versions that can no longer be referred to under this name."""


class GlobalSteering(_Answer):
    """Steering applied to every newly admitted request, before its modules and its own edits."""

    epoch: int
    """Epoch of the registry. Responses report the epoch at which they were admitted."""
    digest: str | None
    """Digest of all global steering, or null if none is set."""
    modules: list[ModuleUse]
    """Modules, which apply first. They are the versions at the time of `set`; later versions do not change them."""
    content: Content
    """Edits that apply after the modules."""


class LiveStrengths(_Answer):
    """Confirmation of a change of live strengths."""

    id: str
    """Id of the request, as in the path."""
    position: int
    """Position from which on the strengths hold for all samples, in the prompt and the generated tokens together, from
    0."""
    positions: dict[int, int]
    """Position from which on they hold for each sample that runs, by the index of its choice."""
    strengths: dict[str, float]
    """The strengths that were set, by name."""


class ErrorDetail(_Answer):
    """Description of an error in OpenAI's format."""

    message: str
    """Field and problem in words."""
    type: str
    """Name of the error, e.g. `BadRequestError`."""
    param: str | None
    """Path of the invalid value."""
    code: int
    """HTTP status."""


class ErrorAnswer(_Answer):
    """Error response."""

    error: ErrorDetail
    """The error."""
