# SPDX-License-Identifier: Apache-2.0
"""What a consumer of captured rows is: the whole contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from vllm_steer.capture.results import CapturedRequest
from vllm_steer.errors import SteeringError
from vllm_steer.spec import CaptureSpec
from vllm_steer.spec.scalars import shown

THREAD_PREFIX = "capture-"
"""How the names of threads begin in which consumers work."""


class Consumer(ABC):
    """Where captured rows go.

    A consumer lives in the process that takes requests: the one that made the ``LLM``, or an API server (each of
    several has its own). It is made once, when that process starts, and is offered to requests as
    ``capture={name: spec}``. To add one, subclass this and name the class in an entry point::

        [project.entry-points."vllm_steer.capture_consumers"]
        mine = "my_package:MyConsumer"

    ============== ============================== ==================================== ===============================
    what           when                           in which thread, may it block        what an exception does
    ============== ============================== ==================================== ===============================
    ``__init__``   at the start of the process    the main one; it may                 the process does not start
    ``check``      for each request that names    the one that takes requests (in a    a SteeringError refuses the
                   it, before the engine hears    server its event loop); it must not  request; any other one is an
                   of the request                                                      error of the server (500)
    ``accept``     for each sample of a request,  one thread of this consumer's own,   this request's status is
                   when it has finished, or was   one call at a time; it may: only     ``error`` with the exception's
                   aborted (status ``partial``)   its own captures wait                text; nothing else is touched
    ``close``      once, after the last           any; it may                          it is logged
                   ``accept``
    ============== ============================== ==================================== ===============================

    Options of the operator (``--capture-consumers mine:key=value``) are the keyword arguments of ``__init__``; their
    annotations say what the values are converted to, and unknown ones are refused. Options of a request stand in its
    spec beside ``hooks``; `spec_options` names them.

    Rows of a `CapturedRequest` belong to whoever holds it: they are never written to again, and can be kept, but must
    not be changed, since other consumers may hold the same.
    """

    name: ClassVar[str]
    """What requests call it; the entry point has the same name."""
    spec_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Options that a request's spec may have: name to type, which any annotation that pydantic reads can be."""

    def check(self, spec: CaptureSpec, field: str) -> None:
        """Refuse a spec that this consumer cannot serve.

        Args:
            spec: already checked as far as it concerns everybody.
            field: where it stands in the request, e.g. ``capture.memory``.

        Raises:
            SteeringError: here, an option that is not in `spec_options`, or of another type.
        """
        for name, value in spec.options.items():
            if name not in self.spec_options:
                known = ", ".join(self.spec_options) or "none"
                raise SteeringError(f"{field}.{name}", f"is no option of {self.name}; it has: {known}")
            try:
                TypeAdapter(self.spec_options[name]).validate_python(value, strict=True)
            except ValidationError as error:
                problem = error.errors(include_url=False)[0]["msg"]
                raise SteeringError(f"{field}.{name}", f"{problem}; not {shown(value)}") from None

    @abstractmethod
    def accept(self, captured: CapturedRequest) -> Any:
        """Take the rows of one sample; what is returned becomes `CaptureResult.data`.

        For an answer over HTTP it must consist of JSON's types; in process it can be anything.
        """

    def close(self) -> None:
        """Finish what is open and free what is held."""
        return None
