# SPDX-License-Identifier: Apache-2.0
"""Inspect's provider for vLLM, with request fields and results of steering and capture."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, NoReturn
from urllib.parse import quote

import anyio
import torch
from inspect_ai._util.logger import warn_once
from inspect_ai.log._samples import sample_active
from inspect_ai.model import ChatMessage, GenerateConfig, ModelCall, ModelOutput
from inspect_ai.model._providers.vllm import VLLMAPI
from inspect_ai.tool import ToolChoice, ToolInfo

from vllm_steer.client import CaptureAnswer, Choice, Rows, parse_completion, read_capture_file
from vllm_steer.peers.inspect.fields import Prepared, prepare
from vllm_steer.peers.inspect.rows import FOLDER_SUFFIX, StoredTensor, folder_of, store
from vllm_steer.peers.vllm_lens.tensors import stack_layers

logger = getLogger(__name__)
STREAM = "residual_stream"
READOUTS = "readouts."
_CHOICE_FIELDS = ("capture_results", "readouts", "steering_trace", "token_ids")
# With --steering-peers rhizonymph, capture results are also at the top of the response.
_TOP_FIELDS = ("prompt_token_ids", "capture_results")
_external: dict[tuple[str, str], Any] = {}


@dataclass
class _Request:
    """One request of the current task."""

    prepared: Prepared
    metadata: dict[str, Any] = field(default_factory=dict)


_current: ContextVar[_Request | None] = ContextVar("vllm_steer_request", default=None)


class UncachedOutput(ModelOutput):
    """An output that Inspect's cache cannot store.

    The key of the cache has neither the content of modules nor global steering, and rows lie beside the log of one
    evaluation. A stored answer could be that of another steering, or refer to rows that are not there.
    """

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        warn_once(
            logger,
            "answers of vllm-steer are not cached: they depend on modules, global steering and stored rows, which "
            "the key of the cache lacks; omit cache",
        )
        raise TypeError("answers of vllm-steer are not cached")


class VllmSteerAPI(VLLMAPI):
    """Provider ``vllm-steer/MODEL``: Inspect's ``vllm`` with steering, captures and readouts.

    Without ``base_url``, it starts ``vllm serve MODEL --enable-steering``; further model arguments become flags, and
    those with the value True become flags without a value.

    Args:
        model_name: Model or path, with ``:ADAPTER`` for a LoRA adapter.
        base_url: URL of a server, with or without ``/v1``.
        activations_dir: Folder or URL of captured rows; by default, a folder beside the log. Outside of an evaluation,
            rows are stored only if it is given.
        **arguments: Further arguments of Inspect's ``vllm`` provider.

    Examples:
        >>> from inspect_ai.model import get_model  # doctest: +SKIP
        >>> model = get_model("vllm-steer/demo", base_url="http://localhost:8000/v1")  # doctest: +SKIP
    """

    def __init__(
        self, model_name: str, base_url: str | None = None, activations_dir: str | None = None, **arguments: Any
    ) -> None:
        if base_url is not None:
            base_url = base_url.rstrip("/").removesuffix("/v1") + "/v1"
        super().__init__(model_name, base_url=base_url, **arguments)
        self._activations_dir = activations_dir
        if self._init_base_url is not None:
            # Inspect has one server for each model name, and would send requests for a second URL to the first.
            address = (self._init_base_url, self.base_model)
            self._server = _external.setdefault(address, type(self._server)())
        elif self.server_args.get("enable_steering") is None:
            self.server_args["enable_steering"] = True

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        """Generate with the fields of ``config.extra_body``, and return the results in ``metadata``."""
        request = _Request(prepare(config.extra_body))
        config = config.model_copy(update={"extra_body": dict(request.prepared.logged)})
        token = _current.set(request)
        try:
            answer = await super().generate(input, tools, tool_choice, config)
        finally:
            _current.reset(token)
        output = answer[0] if isinstance(answer, tuple) else answer
        if isinstance(output, ModelOutput):
            if request.metadata:
                output.metadata = {**(output.metadata or {}), **request.metadata}
            output.__class__ = UncachedOutput
        return answer

    def service_model_name(self) -> str:
        """Return the adapter of the current request, if it names one."""
        request = _current.get()
        name = None if request is None else request.prepared.model
        return name or str(super().service_model_name())

    def resolve_stream(self, config: GenerateConfig) -> bool:
        """Return whether to stream: not if the response has rows, readouts or the prompt's tokens."""
        request = _current.get()
        return not (request is not None and request.prepared.needs_whole) and bool(super().resolve_stream(config))

    async def tokenize_messages(self, input: list[ChatMessage]) -> list[int]:
        """Return the tokens of a conversation's prompt."""
        await self._ensure_server_started()
        body = {"model": super().service_model_name(), "messages": await self.messages_to_openai(input)}
        response = await self.http_client.post(f"{self._root}/tokenize", json=body, headers=self._headers)
        response.raise_for_status()
        return list(response.json()["tokens"])

    async def _generate_completion(self, request: dict[str, Any], config: GenerateConfig) -> Any:
        current = _current.get()
        if current is None:
            return await super()._generate_completion(request, config)
        logged = current.prepared.logged
        # Inspect adds fields of its own, such as `continue_final_message`.
        added = {name: value for name, value in (request.get("extra_body") or {}).items() if name not in logged}
        request = {**request, "extra_body": {**current.prepared.body, **added}}
        completion = await super()._generate_completion(request, config)
        if getattr(completion, "choices", None):
            current.metadata = await self._take_results(completion, current.prepared)
        return completion

    async def _take_results(self, completion: Any, prepared: Prepared) -> dict[str, Any]:
        """Move the results from the completion, which is logged, and return the metadata."""
        document = {**completion.model_dump()}
        for name in _TOP_FIELDS:
            (completion.model_extra or {}).pop(name, None)
        for choice in completion.choices:
            for name in _CHOICE_FIELDS:
                (choice.model_extra or {}).pop(name, None)
        metadata: dict[str, Any] = {}
        if document.get("steering_applied"):
            metadata["steering_applied"] = document["steering_applied"]
        if prepared.needs_whole:
            metadata["prompt_token_ids"] = document.get("prompt_token_ids")
        if not prepared.has_results:
            return metadata
        found = [
            await self._metadata_of(choice, raw, prepared)
            for choice, raw in zip(parse_completion(document).choices, document["choices"], strict=True)
        ]
        metadata |= found[0]
        if len(found) > 1:
            metadata["choices"] = found
        return metadata

    async def _metadata_of(self, choice: Choice, raw: Mapping[str, Any], prepared: Prepared) -> dict[str, Any]:
        tensors: dict[str, torch.Tensor] = {}
        facts: dict[str, dict[str, Any]] = {}
        if "memory" in choice.captures:
            sites = await self._rows_of(choice.captures["memory"])
            if prepared.stacked:
                tensors[STREAM] = stack_layers({site: rows.rows for site, rows in sites.items()})
                facts[STREAM] = {"layers": sorted(layer for _, layer in sites)}
            else:
                for (point, layer), rows in sites.items():
                    tensors[f"{point}.{layer}"] = rows.rows
                    tensors[f"{point}.{layer}.positions"] = torch.from_numpy(rows.positions)
        for name, readout in choice.readouts.items():
            arrays = {"values": readout.values, "positions": readout.positions, "indices": readout.indices}
            tensors |= {_key(name, part): torch.from_numpy(each) for part, each in arrays.items() if each is not None}
        folder, base = self._folder()
        stored = await anyio.to_thread.run_sync(store, tensors, facts, folder, base)
        readouts = {name: _parts(stored, name) for name in choice.readouts}
        found: dict[str, Any] = {"token_ids": raw.get("token_ids")}
        if choice.captures:
            found["activations"] = {name: each for name, each in stored.items() if not name.startswith(READOUTS)}
        reports = {name: report.data for name, report in choice.captures.items() if name != "memory"}
        if reports:
            found["capture_results"] = reports
        if readouts:
            found["readouts"] = found["hook_results"] = readouts
        return found

    async def _rows_of(self, capture: CaptureAnswer) -> Mapping[tuple[str, int], Rows]:
        if capture.status != "ok":
            raise RuntimeError(f"the activations are not complete: {capture.error}")
        if capture.id is None:
            return capture.sites
        url = f"{self._root}/v1/captures/{quote(capture.id, safe='')}"
        response = await self.http_client.get(url, headers=self._headers)
        response.raise_for_status()
        return await anyio.to_thread.run_sync(read_capture_file, response.content)

    def _folder(self) -> tuple[str | None, str | None]:
        """Return the folder of captured rows, and the folder that paths are relative to."""
        if self._activations_dir is not None:
            return self._activations_dir.rstrip("/"), None
        sample = sample_active()
        if sample is None or not sample.log_location:
            return None, None
        base = folder_of(sample.log_location)
        stem = sample.log_location.rpartition("/")[2].rpartition(".")[0]
        return f"{base}/{stem}{FOLDER_SUFFIX}", base

    @property
    def _root(self) -> str:
        return str(self.base_url).rstrip("/").removesuffix("/v1")

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}


def _key(readout: str, part: str) -> str:
    return f"{READOUTS}{readout}.{part}"


def _parts(stored: Mapping[str, StoredTensor], name: str) -> dict[str, Any]:
    """Return the tensors of a readout, and for a probe the mean of its values."""
    parts: dict[str, Any] = {part: stored.get(_key(name, part)) for part in ("values", "positions", "indices")}
    values = parts["values"]
    if values.ndim == 1 and len(values):
        parts["mean"] = float(values.mean())
    return {part: each for part, each in parts.items() if each is not None}
