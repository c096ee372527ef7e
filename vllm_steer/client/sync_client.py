# SPDX-License-Identifier: Apache-2.0
"""Synchronous client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import quote

import httpx

from vllm_steer.client.encoding import to_json
from vllm_steer.client.endpoints import (
    CHAT,
    ROOT,
    Endpoint,
    Retry,
    answer_of,
    auth_headers,
    check_url,
    data_param,
    error_of,
    generation,
    iter_events,
    module_path,
    served_model,
    streamed_study,
    study_result,
    without_none,
)
from vllm_steer.client.responses import (
    CaptureAnswer,
    Completion,
    Piece,
    Rows,
    parse_piece,
    read_capture_file,
)
from vllm_steer.errors import SteeringError
from vllm_steer.registry.schema import Deleted, GlobalSteering, LiveStrengths, ModuleInfo, ModuleList

if TYPE_CHECKING:
    from vllm_steer.client.patching import HttpRunner
    from vllm_steer.patching import PatchingResult

T = TypeVar("T")
Tokens: TypeAlias = list[int]  # the method `list` hides the type inside of the class


class Client:
    """Client for modules, global steering, completions and captures.

    Vectors can be lists, numpy arrays or torch tensors; arrays are sent packed. All methods raise
    `ServerError` for error responses and ``httpx.TransportError`` if the server cannot be
    reached. Requests that the server defers (429, 503) are retried, and so are idempotent requests whose connection was
    lost; ``retry`` sets how often.

    Examples:
        >>> from vllm_steer import Client  # doctest: +SKIP
        >>> client = Client("http://localhost:8000")  # doctest: +SKIP
        >>> client.complete("Once upon a time", max_tokens=16, steering_modules=["calm"]).text  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str = "http://localhost:8000",
        *,
        api_key: str | None = None,
        model: str | None = None,
        retry: Retry = Retry(),  # noqa: B008 - immutable
        timeout: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Create a client. Nothing is sent yet.

        Args:
            url: URL of the server, without ``/v1``.
            api_key: Bearer token.
            model: Model named in requests; the server's first model by default.
            retry: Retry policy.
            timeout: Seconds without data after which a connection fails.
            transport: Replacement for httpx's transport, for tests.
        """
        headers = auth_headers(api_key)
        self._http = httpx.Client(base_url=check_url(url), headers=headers, timeout=timeout, transport=transport)
        self._model = model
        self._retry = retry

    def register(self, name: str, **content: Any) -> ModuleInfo:
        """Register a module; the arguments are those of `SteeringRegistry.register`."""
        body = {"name": name, **without_none(content, "module")}
        return self._request(answer_of(ModuleInfo, "POST", "/modules", json=body))

    def register_file(self, name: str, source: str | Path | bytes) -> ModuleInfo:
        """Register the module in a local file, also of another tool, given by its path or its bytes."""
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        return self._request(answer_of(ModuleInfo, "POST", "/modules", content=data, params={"name": name}))

    def list(self) -> ModuleList:
        """Return all modules."""
        return self._request(answer_of(ModuleList, "GET", "/modules"))

    def get(self, reference: str, *, data: bool = False) -> ModuleInfo:
        """Return one module, including its vectors if ``data`` is set."""
        return self._request(answer_of(ModuleInfo, "GET", module_path(reference), params=data_param(data)))

    def delete(self, reference: str) -> Deleted:
        """Delete a module, or one version of it."""
        # Not idempotent: after the first attempt, the module does not exist.
        return self._request(answer_of(Deleted, "DELETE", module_path(reference), idempotent=False))

    def set(self, **change: Any) -> GlobalSteering:
        """Set global steering; the arguments are those of `SteeringRegistry.set`."""
        return self._request(answer_of(GlobalSteering, "POST", "/set", json=without_none(change, "set")))

    def clear(self) -> GlobalSteering:
        """Clear global steering."""
        return self._request(answer_of(GlobalSteering, "POST", "/clear"))

    def status(self, *, data: bool = False) -> GlobalSteering:
        """Return the global steering, including its vectors if ``data`` is set."""
        return self._request(answer_of(GlobalSteering, "GET", "/set", params=data_param(data)))

    def complete(self, prompt: Any, **fields: Any) -> Completion:
        """Complete a prompt; ``fields`` are further fields of the body, such as steering and capture."""
        return self._request(generation("/v1/completions", {"prompt": prompt, **fields}))

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Completion:
        """Answer a conversation; ``fields`` are further fields of the body, such as steering and capture."""
        return self._request(generation(CHAT, {"messages": list(messages), **fields}))

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Iterator[Piece]:
        """Answer a conversation as a stream; the arguments are those of `chat`."""
        endpoint = generation(CHAT, {"messages": list(messages), **fields}, stream=True)
        with closing(self._send(endpoint, stream=True)) as response:
            for event in iter_events(response.iter_bytes()):
                yield parse_piece(event)

    def patch(self, **study: Any) -> PatchingResult:
        """Run a patching study on the server's engine.

        Args:
            **study: Arguments of `PatchingStudy` and of its method `sweep`, such as clean, corrupt, answer, foil and
                points. The metric is a name; ``file`` and ``progress`` are not accepted.

        Returns:
            The grids, as `PatchingStudy.sweep` returns them.
        """
        # Studies are received as events, because connections without data are closed during long ones.
        with closing(self.stream_patch(**{**study, "return_file": True})) as events:
            for event in events:
                if event["event"] == "summary":
                    return study_result(event)
        raise RuntimeError("the server ended the study without a result")

    def stream_patch(self, **study: Any) -> Generator[Mapping[str, Any]]:
        """Run a patching study and yield its events ``start``, ``cell`` (one for each cell) and ``summary``.

        The arguments are those of `patch`. The study ends when the iterator is closed.
        """
        with closing(self._send(streamed_study(study), stream=True)) as response:
            for event in iter_events(response.iter_bytes()):
                if event["event"] == "error":
                    parse_piece(event)  # raises the error
                yield event

    def set_strength(self, request_id: str, **strengths: float) -> LiveStrengths:
        """Set live strengths of a running request; ``request_id`` is the ``id`` of its response or pieces."""
        path = f"/requests/{quote(request_id, safe='')}"
        return self._request(answer_of(LiveStrengths, "POST", path, json=to_json(dict(strengths), "strengths")))

    def fetch(self, capture: CaptureAnswer | str) -> dict[tuple[str, int], Rows]:
        """Return the rows of a capture that were too large for the response, by point and layer."""
        capture_id = capture if isinstance(capture, str) else capture.id
        if capture_id is None:
            raise SteeringError("capture", "has no rows to fetch: they are part of the answer, or the capture failed")
        path = f"/v1/captures/{quote(capture_id, safe='')}"
        return self._request(Endpoint("GET", path, lambda response: read_capture_file(response.content)))

    def capabilities(self) -> dict[str, Any]:
        """Return what the server's engine supports, as ``GET /v1/steering/capabilities`` does."""
        return self._request(Endpoint("GET", f"{ROOT}/capabilities", lambda response: dict(response.json())))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> Tokens:
        """Return the tokens of a text."""
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        read: Callable[[httpx.Response], Tokens] = lambda response: [*response.json()["tokens"]]  # noqa: E731
        return self._request(Endpoint("POST", "/tokenize", read, json=body, names_model=True))

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        body, read = to_json({"tokens": tokens}, "body"), lambda response: str(response.json()["prompt"])
        return self._request(Endpoint("POST", "/detokenize", read, json=body, names_model=True))

    def _patching_runner(self) -> HttpRunner:
        """Return the runner that `PatchingStudy` uses for this client."""
        from vllm_steer.client.patching import HttpRunner

        return HttpRunner(self)

    @property
    def model(self) -> str:
        """Model that requests name."""
        if self._model is None:
            self._model = self._request(served_model())
        return self._model

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _request(self, endpoint: Endpoint[T]) -> T:
        return endpoint.parse(self._send(endpoint))

    def _send(self, endpoint: Endpoint[Any], *, stream: bool = False) -> httpx.Response:
        """Send a request, with retries, until it succeeds or fails for good."""
        attempt, model = 0, self.model if endpoint.names_model else None
        while True:
            attempt += 1
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.send(endpoint.request(self._http, model), stream=stream)
                if outcome.is_success:
                    return outcome
                outcome.read()
            except httpx.TransportError as error:
                outcome = error
            delay = self._retry.delay(attempt, outcome, endpoint.idempotent)
            if delay is None:
                raise error_of(outcome, self._http.base_url)
            time.sleep(delay)
