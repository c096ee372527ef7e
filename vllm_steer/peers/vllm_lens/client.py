# SPDX-License-Identifier: Apache-2.0
"""HTTP client with the methods of vllm-lens's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import quote

import httpx
import torch

from vllm_steer.client import auth_headers, parse_error, to_json
from vllm_steer.errors import SteeringError
from vllm_steer.peers.refusals import CLIENT, CLIENT_ARGUMENT, REFUSALS, refuse_attribute, refuse_names
from vllm_steer.peers.vllm_lens.keys import CAPTURE_KEY, STEERING_KEY, TRANSPORT_KEY, SteeringVector
from vllm_steer.peers.vllm_lens.tensors import decode_activations, decompress

HEADER = "x-vllm-lens-"


@dataclass(frozen=True, eq=False)
class LensResponse:
    """Response to one request."""

    text: str
    """Text of the first choice."""
    activations: Mapping[str, torch.Tensor]
    """``residual_stream`` ``(layers, prompt + generated - 1, hidden)``, if it was requested."""
    document: Mapping[str, Any]
    """The complete JSON response."""


class VLLMLensClient:
    """Client of a server with ``--enable-steering --steering-peers vllm-lens``.

    Examples:
        >>> client = VLLMLensClient("http://localhost:8000/v1", model="m")  # doctest: +SKIP
        >>> client.generate("one", capture_layers=[3]).activations["residual_stream"].shape  # doctest: +SKIP
    """

    def __init__(
        self,
        base_url: str = "http://localhost:8000",
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Create a client. Nothing is sent yet.

        Args:
            base_url: URL of the server, with or without ``/v1``.
            model: Model named in requests; the server's first model by default.
            api_key: Bearer token.
            timeout: Seconds without data after which a connection fails.
            transport: Replacement for httpx's transport, for tests.
        """
        url = base_url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(base_url=url, headers=auth_headers(api_key), timeout=timeout, transport=transport)
        self._model = model

    @property
    def model(self) -> str:
        """Model that requests name."""
        if self._model is None:
            self._model = str(self._send("GET", "/v1/models").json()["data"][0]["id"])
        return self._model

    def generate(
        self,
        prompt: Any,
        max_tokens: int = 16,
        temperature: float = 0.0,
        capture_layers: Sequence[int] | bool | None = None,
        steering_vectors: Sequence[SteeringVector] | SteeringVector | None = None,
        **fields: Any,
    ) -> LensResponse:
        """Complete a prompt.

        Args:
            prompt: Text or token ids.
            max_tokens: Most tokens to generate.
            temperature: Sampling temperature.
            capture_layers: Layers whose output is returned, or True for all.
            steering_vectors: Vectors to add.
            **fields: Further fields of the body, such as ``lora_request={"lora_name": ...}``, and
                ``activations_transport``: binary, the default, or base64.

        Raises:
            ServerError: The server refused the request.
            SteeringError: An argument is not supported.
        """
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, **fields}
        return self._post("/v1/completions", body, capture_layers, steering_vectors)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int = 16,
        temperature: float = 0.0,
        capture_layers: Sequence[int] | bool | None = None,
        steering_vectors: Sequence[SteeringVector] | SteeringVector | None = None,
        **fields: Any,
    ) -> LensResponse:
        """Answer a conversation; further arguments as for :meth:`generate`."""
        body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": temperature, **fields}
        return self._post("/v1/chat/completions", body, capture_layers, steering_vectors)

    def __getattr__(self, name: str) -> NoReturn:
        refuse_attribute(self, name, REFUSALS["vllm-lens"][CLIENT])

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> VLLMLensClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, path: str, body: Mapping[str, Any], layers: Any, vectors: Any) -> LensResponse:
        given = (name for name, value in body.items() if value is not None)
        refuse_names(given, REFUSALS["vllm-lens"][CLIENT_ARGUMENT])
        body = dict(body)
        transport = body.pop(TRANSPORT_KEY, None) or "binary"
        extra: dict[str, Any] = dict(body.get("extra_args") or {})
        if layers is not None:
            extra |= {CAPTURE_KEY: layers if layers is True else list(layers), TRANSPORT_KEY: transport}
        if vectors is not None:
            listed = [vectors] if isinstance(vectors, SteeringVector) else vectors
            extra[STEERING_KEY] = [vector.model_dump() for vector in listed]
        body = {"model": self.model, **body, **({"extra_args": extra} if extra else {})}
        document = self._send("POST", path, json.dumps(to_json(body, "body")).encode()).json()
        activations = document.get("activations") or {}
        if document.get("activations_error"):
            raise SteeringError("activations", f"are not complete: {document['activations_error']}")
        tensors = decode_activations(activations)
        for name, value in activations.items():
            if isinstance(value, Mapping) and "handle" in value:
                tensors[name] = self.fetch(value["handle"])
        choice = document["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"].get("content") or ""
        return LensResponse(text, tensors, document)

    def fetch(self, handle: str) -> torch.Tensor:
        """Return the activations behind a handle.

        Raises:
            ServerError: The handle has expired or never existed.
        """
        response = self._send("GET", f"/v1/activations/{quote(handle, safe='')}")
        dtype = getattr(torch, response.headers[f"{HEADER}original-dtype"].removeprefix("torch."))
        shape = json.loads(response.headers[f"{HEADER}shape"])
        size = int(response.headers[f"{HEADER}bytes"])
        data = decompress(response.content, size, "activations")
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)

    def _send(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        headers = {} if content is None else {"content-type": "application/json"}
        response = self._http.request(method, path, content=content, headers=headers)
        if not response.is_success:
            raise parse_error(response)
        return response
