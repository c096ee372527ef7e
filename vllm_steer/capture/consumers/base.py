# SPDX-License-Identifier: Apache-2.0
"""The interface of consumers of captured rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from vllm_steer.capture.results import CapturedRequest, SubmittedRequest
from vllm_steer.errors import SteeringError
from vllm_steer.request import CaptureSpec
from vllm_steer.request.capture import SPEC_KEYS
from vllm_steer.request.scalars import closest, shown

THREAD_PREFIX = "capture-"
"""Name prefix of the threads in which consumers run."""


class Consumer(ABC):
    """A destination of captured rows.

    A consumer is created once per front end: in the process of the ``LLM``, or in each API server.
    Requests name it as ``capture={name: spec}``. To add one, subclass this class and declare an entry point:

    ```toml
    [project.entry-points."vllm_steer.capture_consumers"]
    mine = "my_package:MyConsumer"
    ```

    Every method except ``check`` may block:

    * ``__init__`` is called when the process starts, and ``start`` before the first request, in the main thread. If one
      of them raises, the process does not start.
    * ``check`` is called for each request that names the consumer, before it reaches the engine, in the request's
      thread (a server's event loop). SteeringError rejects the request; other exceptions are server errors (500).
    * ``begin`` is called for each sample of a request that the front end accepted, in the consumer's own thread and in
      order with ``accept``. Exceptions are logged.
    * ``accept`` is called for each sample of a request that has finished or was aborted (status ``partial``), in the
      consumer's own thread, one call at a time. If it raises, the capture's status becomes ``error`` and the exception
      is logged; nothing else is affected.
    * ``close`` is called once, after the last ``accept``, in any thread. Exceptions are logged.

    The operator's options (``--capture-consumers mine:key=value``) are keyword arguments of ``__init__``. Values are
    converted to the annotated types, and unknown options are rejected. A request gives options as further keys of its
    spec, next to ``hooks``; they must be listed in `spec_options`.

    The rows of a `CapturedRequest` may be kept but not modified, because several consumers can share them. vllm-steer
    does not write to them again.

    Examples:
        >>> from vllm_steer import Consumer
        >>> class Count(Consumer):
        ...     name = "count"
        ...     def accept(self, captured):
        ...         return {site: len(rows.positions) for site, rows in captured.sites.items()}
    """

    name: ClassVar[str]
    """Name in requests; must equal the name of the entry point."""
    spec_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Options that a request's spec may set: names and types (any annotation that pydantic supports)."""

    def start(self, model: str) -> None:
        """Prepare for requests of a model, or refuse it.

        Args:
            model: Name of the served model.

        Raises:
            SteeringError: The consumer cannot receive rows of this model.
        """
        return None

    def check(self, spec: CaptureSpec, field: str) -> None:
        """Reject a spec that this consumer cannot serve. Overrides should call ``super().check``.

        Args:
            spec: The spec, valid in all other respects.
            field: Path of the spec in the request, such as ``capture.memory``.

        Raises:
            SteeringError: An option is not in `spec_options`, or its value has the wrong type.
        """
        for name, value in spec.options.items():
            if name not in self.spec_options:
                similar = closest(name, (*SPEC_KEYS, *self.spec_options))
                raise SteeringError(
                    f"{field}.{name}",
                    f"is neither a field of a capture spec ({', '.join(SPEC_KEYS)}) nor an option of {self.name} "
                    f"({', '.join(self.spec_options) or 'none'})" + (f"; did you mean {similar}?" if similar else ""),
                )
            convert_option(self.spec_options[name], value, f"{field}.{name}", strict=True)

    def begin(self, submitted: SubmittedRequest) -> None:
        """Note that a sample was submitted, ahead of its rows. Called only if the class overrides it."""
        return None

    @abstractmethod
    def accept(self, captured: CapturedRequest) -> Any:
        """Process the rows of one sample.

        Returns:
            The value of `CaptureResult.data`. HTTP responses require a JSON-serializable value.

        Raises:
            Exception: The rows could not be processed. HTTP responses contain its class and text, so the text must not
                have secrets of the server.
        """

    def close(self) -> None:
        """Complete pending output and release resources."""
        return None


def convert_option(annotation: Any, value: Any, field: str, *, strict: bool = False) -> Any:
    """Convert an option's value to its annotated type.

    Args:
        annotation: Any type that pydantic supports.
        value: The given value.
        field: Path of the option, for errors.
        strict: Whether to reject values of other types instead of converting them.

    Raises:
        SteeringError: The value does not fit the type.
    """
    try:
        return TypeAdapter(annotation).validate_python(value, strict=strict)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise SteeringError(field, f"{problem}; got {shown(value)}") from None
