# SPDX-License-Identifier: Apache-2.0
"""The registry of one front end."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from vllm_steer import audit
from vllm_steer.errors import SteeringError
from vllm_steer.log import steering_logger
from vllm_steer.metrics.collectors import set_gauge
from vllm_steer.models.centring import Centring
from vllm_steer.models.sae_features import FeatureReader
from vllm_steer.params import APPLIED_KEY
from vllm_steer.program import Program
from vllm_steer.program.magnitude import check_magnitude
from vllm_steer.registry.composer import RequestComposer
from vllm_steer.registry.describe import describe_module, describe_modules, describe_steering
from vllm_steer.registry.directions import streams_at
from vllm_steer.registry.errors import FIELD, RegistryUnavailableError, UnknownModuleError
from vllm_steer.registry.index import RegistryLimits, ResolvedModule
from vllm_steer.registry.metadata import ModuleMetadata, parse_metadata
from vllm_steer.registry.module import Module, parse_module
from vllm_steer.registry.schema import Deleted, GlobalSteering, ModuleInfo, ModuleList
from vllm_steer.registry.snapshot import Snapshot
from vllm_steer.registry.storage import MemoryStore, RegistryStore, SharedCall
from vllm_steer.registry.vector_files import read_vector_file
from vllm_steer.request.references import Reference, parse_reference, parse_references, read_name
from vllm_steer.request.scalars import suggest_arguments

logger = steering_logger(__name__)

DEFAULT_LIMITS = RegistryLimits()
_ARGUMENT_ALIASES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("steering_vectors", "vectors", "vector"), "base")
    | dict.fromkeys(("prefill_steering_vectors", "prefill_vectors"), "prefill")
    | dict.fromkeys(("decode_steering_vectors", "decode_vectors"), "decode")
    | {"steering": "edits", "steering_modules": "modules"}
)


class ProgramChecker(Protocol):
    """Properties of the engine that programs are checked against; implemented by ``Capabilities``."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def check(self, program: Program, prompt_len: int | None) -> None:
        """Raise ``SteeringError`` if the engine cannot serve ``program`` for a prompt of that length."""


class SteeringRegistry:
    """Named modules and global steering of one engine, validated against its capabilities.

    A change increments the epoch and applies to requests admitted afterwards. Repeating a change has no effect.
    Thread-safe.

    Examples:
        >>> llm.steering.register("calm", base={"post_block": {1: [0.5] * 256}})  # doctest: +SKIP
        >>> llm.steering.set(modules=[("calm", 0.5)]).epoch  # doctest: +SKIP
        >>> llm.steering.clear()  # doctest: +SKIP
    """

    def __init__(
        self,
        checker: ProgramChecker,
        store: RegistryStore | None = None,
        limits: RegistryLimits = DEFAULT_LIMITS,
        model_name: str | None = None,
        saes: Mapping[str, str] | None = None,
        centring: Centring = "unknown",
        sae_any_site: bool = False,
    ) -> None:
        """Create a registry and validate the global steering that ``store`` already contains.

        Args:
            checker: Capabilities of the engine.
            store: Storage of the state; by default the memory of this process.
            limits: Size limits for changes.
            model_name: Label of the engine's metrics; None disables metrics.
            saes: Folder of each autoencoder of the engine by name.
            centring: How the setting ``center_writing_weights`` of an autoencoder changes rows of the engine's model.
            sae_any_site: Whether autoencoders are served at other sites than those that their files name.

        Raises:
            SteeringError: The stored global steering cannot be read, or the engine cannot serve it.
        """
        self._checker = checker
        self._store = MemoryStore() if store is None else store
        self._queries = SharedCall(self.snapshot, "vllm-steer-registry-query")
        self._limits = limits
        features = FeatureReader(saes or {}, centring, any_site=sae_any_site)
        self._composer = RequestComposer(features, checker.num_layers)
        self._model_name = model_name
        self._reported: Snapshot | None = None
        self._check_stored(self.snapshot())

    @property
    def max_norm(self) -> float:
        """Largest norm that an edit may add on this server; 0 for no limit."""
        return self._limits.max_norm

    def streams_at(self, point: str, layers: Collection[int]) -> builtins.list[float]:
        """Return the lengths of the stream that the registered modules tell, without waiting for newer ones."""
        return self._store.snapshot.streams_at(point, layers)

    @suggest_arguments(_ARGUMENT_ALIASES)
    def register(
        self,
        name: str,
        *,
        base: Any = None,
        prefill: Any = None,
        decode: Any = None,
        edits: Any = None,
        probes: Any = None,
        description: str | None = None,
        model: str | None = None,
        provenance: Mapping[str, str] | None = None,
    ) -> ModuleInfo:
        """Register a module, or a new version of it. Running requests keep the version they were admitted with.

        Args:
            name: 1 to 64 ASCII letters, digits, dots, dashes and underscores.
            base: ``{point: {layer: vector | {"vector": ..., "scale": ...}}}``, added to every token. Vectors have
                shape ``[H]`` and any type that requests accept.
            prefill: Like ``base``, for prompt tokens.
            decode: Like ``base``, for generated tokens.
            edits: List of `Edit` or of dicts with its arguments, applied after ``base``,
                ``prefill`` and ``decode``.
            probes: ``{name: probe}`` for readouts, captures and vectors of edits. A probe is a direction, or a dict of
                its ``weights`` and of ``bias``, ``sigmoid``, ``point`` and ``layer``, which readouts that name it take.
                A probe with a hidden layer has ``outputs``, ``biases`` and ``activation`` too, for readouts only.
            description: Free text.
            model: Model that the vectors were computed for; informational.
            provenance: Origin of the vectors; informational.

        Returns:
            Description of the registered version.

        Raises:
            SteeringError: A value is invalid, or the engine cannot serve the module.
        """
        content = {"base": base, "prefill": prefill, "decode": decode, "edits": edits, "probes": probes}
        metadata = parse_metadata({"description": description, "model": model, "provenance": provenance})
        return self.register_module(name, parse_module(content), metadata)

    def register_file(self, name: str, source: str | Path | bytes) -> ModuleInfo:
        """Register the module in a file of ours or of another tool, given as a path or as bytes.

        Raises:
            SteeringError: The file cannot be read, is invalid, or contains a module that the engine cannot serve.
        """
        return self.register_module(name, *read_vector_file(source))

    def ensure_file(self, name: str, path: str | Path) -> None:
        """Register a file at server start, unless it is the current version of ``name``.

        A current version whose stored content is damaged is registered again. Another current version is replaced with
        a warning, because it may have been registered since the last start.
        """
        module, metadata = read_vector_file(path)
        snapshot = self.snapshot()
        current = [version.digest for version in snapshot.index.modules.get(read_name(name, "name"), ())][-1:]
        if current == [module.digest] and module.digest not in snapshot.problems:
            return
        if current and current != [module.digest]:
            logger.warning(
                "Module %s: the file %s (%s) replaces the registered version %s", name, path, module.digest, current[0]
            )
        with audit.attribute_to(audit.START):
            self.register_module(name, module, metadata)

    def register_module(self, name: str, module: Module, metadata: ModuleMetadata) -> ModuleInfo:
        """Register a parsed module; see `register`."""
        name = read_name(name, "name")
        self._checker.check(module.program, None)
        check_magnitude(module.program, self._limits.max_norm, streams_at=partial(streams_at, module, metadata))
        if module.width != self._checker.hidden_size:
            raise SteeringError(
                "probes", f"have width {module.width}; the model's hidden size is {self._checker.hidden_size}"
            )
        snapshot = self._change(
            "register",
            name,
            lambda old: old.with_module(name, module, metadata, time.time(), self._limits),
            lambda _: [module.digest],
        )
        return describe_module(snapshot, Reference(name, module.digest))

    def list(self) -> ModuleList:
        """Return the descriptions of all modules, ordered by name."""
        return describe_modules(self.snapshot())

    def get(self, reference: str | Reference, *, data: bool = False) -> ModuleInfo:
        """Return the description of one module, ``"calm"`` or ``"calm@sha256:..."``.

        Args:
            reference: Name, name and digest, or digest of the module.
            data: Whether to include the vectors.

        Raises:
            UnknownModuleError: There is no such module.
        """
        return describe_module(self.snapshot(), parse_reference(reference, "name"), data=data)

    def delete(self, reference: str | Reference) -> Deleted:
        """Delete a module, or one version of it. Running requests and global steering keep its content.

        Raises:
            UnknownModuleError: There is no such module.
        """
        wanted = parse_reference(reference, "name")
        if wanted.name is None:
            raise SteeringError("name", "is missing; give a name, or a name with a digest")
        name, deleted = wanted.name, builtins.list[str]()

        def without(old: Snapshot) -> Snapshot:
            old.find(wanted, "name")
            digests = [version.digest for version in old.index.modules[name]]
            deleted[:] = [digest for digest in digests if wanted.digest in (None, digest)]
            return old.without(name, wanted.digest)

        return Deleted(epoch=self._change("delete", name, without, lambda _: deleted).epoch, name=name, deleted=deleted)

    @suggest_arguments(_ARGUMENT_ALIASES)
    def set(
        self,
        *,
        base: Any = None,
        prefill: Any = None,
        decode: Any = None,
        edits: Any = None,
        modules: Any = None,
        replace: bool = False,
    ) -> GlobalSteering:
        """Update global steering, which applies to every newly admitted request before its own steering.

        Fields that are not given stay unchanged. In ``base``, ``prefill`` and ``decode``, each vector replaces the
        vector of its layer and point; ``edits`` and ``modules`` are replaced completely. Fields apply in the order
        ``modules``, ``base``, ``prefill``, ``decode``, ``edits``.

        Args:
            base: Vectors added to every token, as in `register`.
            prefill: Vectors added to prompt tokens, as in `register`.
            decode: Vectors added to generated tokens, as in `register`.
            edits: List of edits, as in `register`.
            modules: List of references as in ``steering_modules``. Their current versions are applied; later versions
                have no effect.
            replace: Whether to remove all fields that are not given.

        Raises:
            SteeringError: A value is invalid, or the engine cannot serve it for prompts of every length.
            UnknownModuleError: There is no such module; the message lists the registered ones.
        """
        content = {"base": base, "prefill": prefill, "decode": decode, "edits": edits}
        given = {key: value for key, value in content.items() if value is not None}
        if not given and modules is None:
            raise SteeringError("set", f"is empty; provide at least one of {', '.join(content)}, modules, or use clear")
        for name, value in (*given.items(), ("modules", modules)):
            if isinstance(value, (list, tuple, Mapping)) and not value:
                raise SteeringError(
                    name,
                    "is empty, and set keeps the fields that are not given; "
                    "to remove fields, set the others with replace=True, or use clear",
                )
        change = parse_module(given) if given else Module()
        references = None if modules is None else parse_references(modules, "modules")

        def with_steering(old: Snapshot) -> Snapshot:
            steering = old.index.steering
            resolved: tuple[ResolvedModule, ...] = () if replace else steering.modules
            if references is not None:
                try:
                    resolved = tuple(old.find_edits(each, f"modules[{i}]") for i, each in enumerate(references))
                except UnknownModuleError as error:
                    raise error.with_names(old.index.modules) from None
            before = Module() if replace or steering.content is None else old.content(steering.content)
            new = old.with_steering(resolved, before.merged(change), self._limits)
            self._check_global(new)
            return new

        return describe_steering(self._change("set", None, with_steering, _steering_digests))

    def clear(self) -> GlobalSteering:
        """Clear global steering for newly admitted requests."""

        def without_steering(old: Snapshot) -> Snapshot:
            return old.with_steering((), Module(), self._limits)

        return describe_steering(self._change("clear", None, without_steering, _steering_digests))

    def status(self, *, data: bool = False) -> GlobalSteering:
        """Return the description of global steering, with its vectors if ``data``."""
        return describe_steering(self.snapshot(), data=data)

    def snapshot(self) -> Snapshot:
        """Return the newest snapshot, including changes by other processes; raises ``RegistryUnavailableError``."""
        snapshot = self._store.refresh() if self._store.is_stale() else self._store.snapshot
        self._update_gauges(snapshot)
        return snapshot

    @property
    def is_remote(self) -> bool:
        """Whether `snapshot` can wait for another machine."""
        return self._store.is_remote

    def is_stale(self) -> bool:
        """Return whether `snapshot` would read files or a database's content."""
        return self._store.is_stale()

    async def refresh(self) -> Snapshot:
        """Return `snapshot` without waiting for files or a database in the event loop."""
        if self.is_remote or self.is_stale():
            return await self._queries.run()
        return self._store.snapshot

    def compose(self, extra: Mapping[str, Any], snapshot: Snapshot | None = None) -> Mapping[str, Any]:
        """Return a request's ``extra_args`` for the engine, by default with the newest snapshot.

        See `RequestComposer.compose`.
        """
        if snapshot is None:
            # A composed request needs no snapshot, and the newest one may have to be read from another machine.
            snapshot = self._store.snapshot if APPLIED_KEY in extra else self.snapshot()
        return self._composer.compose(extra, snapshot)

    def _change(
        self,
        event: str,
        name: str | None,
        update: Callable[[Snapshot], Snapshot],
        digests: Callable[[Snapshot], builtins.list[str]],
    ) -> Snapshot:
        """Store a change and write its audit record, with the digests that ``digests`` returns for the new snapshot."""
        before = 0

        def update_and_note(old: Snapshot) -> Snapshot:
            nonlocal before
            before = old.epoch
            return update(old)

        after = self._store.change(update_and_note)
        audit.record(event, before=before, after=after.epoch, name=name, digests=digests(after))
        self._update_gauges(after)
        return after

    def _update_gauges(self, snapshot: Snapshot) -> None:
        if snapshot is self._reported or self._model_name is None:
            return
        self._reported = snapshot
        # Every process that reads the registry sees its newest state, so the last one to set the gauges is right.
        gauges = {
            "registry_modules": len(snapshot.index.modules),
            "registry_bytes": snapshot.num_bytes,
            "registry_epoch": snapshot.epoch,
            "global_steering": snapshot.steering_digest is not None,
        }
        for key, value in gauges.items():
            set_gauge(key, value, model_name=self._model_name)

    def _check_stored(self, snapshot: Snapshot) -> None:
        """Raise ``SteeringError`` unless the global steering that a registry has at start can be served."""
        try:
            self._check_global(snapshot)
        except RegistryUnavailableError as error:
            raise RegistryUnavailableError(
                FIELD, f"its global steering cannot be read: {error}; restore the registry, or use another one"
            ) from None
        except SteeringError as error:
            raise SteeringError(
                FIELD,
                f"its global steering cannot be served: {error}; use another registry, or start with the model and the "
                "settings with which it was set, and clear it",
            ) from None

    def _check_global(self, snapshot: Snapshot) -> None:
        """Raise ``SteeringError`` unless global steering works for every prompt, from the shortest to the longest."""
        program = snapshot.steering_program
        if program is None:
            return
        check_magnitude(program, self._limits.max_norm, streams_at=snapshot.streams_at)
        for prompt_len in (None, 1, max(self._checker.max_model_len - 1, 1)):
            try:
                self._checker.check(program, prompt_len)
            except SteeringError as error:
                raise SteeringError(error.field, f"{error.problem} (global steering applies to every prompt)") from None


def _steering_digests(snapshot: Snapshot) -> list[str]:
    return [] if snapshot.steering_digest is None else [snapshot.steering_digest]
