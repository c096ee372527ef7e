# SPDX-License-Identifier: Apache-2.0
"""Controllers: code of packages that reads a request's readouts and sets its live strengths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar

from vllm_steer.capture.consumers.discovery import convert_options, load_offered
from vllm_steer.errors import SteeringError
from vllm_steer.request.scalars import did_you_mean, shown

ENTRY_POINT_GROUP = "vllm_steer.controllers"


@dataclass(frozen=True)
class ControlledRequest:
    """The sample of a request that a controller controls.

    Examples:
        >>> from vllm_steer import ControlledRequest
        >>> ControlledRequest("request-1", 0, num_prompt_tokens=12, live_names=("calm",)).live_names
        ('calm',)
    """

    request_id: str
    """Id of the request, as given to the engine client."""
    sample: int
    """Index of the sample."""
    num_prompt_tokens: int
    """Length of the prompt."""
    live_names: tuple[str, ...]
    """Names of the live strengths."""


class Controller(ABC):
    """Sets live strengths of a sample from its readouts. Every sample has an instance of its own.

    To add one, subclass this class, declare an entry point of the group ``vllm_steer.controllers``, and switch it on
    with ``--steering-controller NAME:key=value`` or ``AsyncLLM.from_engine_args(steering_controller=...)``. The options
    are keyword arguments of ``__init__``, which must not block.

    Examples:
        >>> from vllm_steer import Controller
        >>> class Damper(Controller):
        ...     name = "damper"
        ...     def on_readouts(self, request, positions, values):
        ...         if "anger" not in positions or not len(positions["anger"]):
        ...             return None
        ...         return {"calm": 2.0 if values["anger"][-1] > 0.5 else 1.0}
    """

    name: ClassVar[str]
    """Name in the flag; must equal the name of the entry point."""
    mode: ClassVar[str] = "async"
    """``"async"``: the generation goes on meanwhile, and an answer takes effect when it arrives."""

    @abstractmethod
    def on_readouts(
        self, request: ControlledRequest, positions: Mapping[str, Any], values: Mapping[str, Any]
    ) -> Mapping[str, float] | None:
        """Return new live strengths by name, or None to leave them as they are.

        Called in a thread of the sample, one call at a time, with the values since the last call.

        Args:
            request: The sample.
            positions: int64 ``[n]`` by the name of the readout, ascending.
            values: float32 ``[n]`` or ``[n, k]`` by the name of the readout.
        """


def controller_class(name: str, field: str) -> type[Controller]:
    """Return the class of a controller.

    Args:
        name: Name of its entry point.
        field: Where it was given, for errors.

    Raises:
        SteeringError: It does not exist, several packages offer it, or it cannot be used.
    """
    group = entry_points(group=ENTRY_POINT_GROUP)
    found = [each for each in group if each.name == name]
    if not found:
        names = sorted(set(group.names))
        hint = did_you_mean(name, names)
        raise SteeringError(
            field,
            f"no installed package offers the controller {shown(name)}; available: {', '.join(names) or 'none'}{hint}",
        )
    offered = load_offered(found, Controller, field)  # type: ignore[type-abstract]
    if offered.mode != "async":
        raise SteeringError(
            field,
            f"mode {shown(offered.mode)} of {name} is not supported: the engine schedules a step before the "
            'readouts of the last one reach the front end, so it cannot wait for an answer; use "async"',
        )
    return offered


def read_controller(value: Mapping[str, Any], field: str) -> tuple[type[Controller], dict[str, Any]]:
    """Return the class of ``{name: options}`` and its converted options, after making one instance.

    Raises:
        SteeringError: ``value`` has another form, or the controller or an option is unknown or invalid.
    """
    if not isinstance(value, Mapping) or len(value) != 1:
        raise SteeringError(
            field, f'must be {{name: options}} with one controller such as {{"pi": {{}}}}, not {value!r}'
        )
    ((name, options),) = value.items()
    offered = controller_class(name, field)
    options = options or {}
    if not isinstance(options, Mapping):
        raise SteeringError(f"{field}.{name}", f"must be a dict of options, not {shown(options)}")
    made = convert_options(offered, options, f"{field}.{name}")
    try:
        offered(**made)
    except Exception as error:
        raise SteeringError(f"{field}.{name}", f"cannot be created: {error}") from error
    return offered, made
