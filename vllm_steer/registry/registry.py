# SPDX-License-Identifier: Apache-2.0
"""The registry of one front end: modules by name, and global steering."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_steer import audit
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.errors import SteeringError
from vllm_steer.metrics.registry import set_registry_gauges
from vllm_steer.program.magnitude import check_magnitude
from vllm_steer.registry.about import About, parse_about
from vllm_steer.registry.composer import RequestComposer
from vllm_steer.registry.describe import describe_list, describe_module, describe_steering
from vllm_steer.registry.module import Module, parse_module
from vllm_steer.registry.module_files import read_module
from vllm_steer.registry.schema import Deleted, GlobalSteering, ModuleInfo, ModuleList
from vllm_steer.registry.snapshot import RegistryLimits, Snapshot, Use
from vllm_steer.registry.storage import MemoryStore, Store
from vllm_steer.spec.references import Reference, parse_reference, parse_references, read_name

DEFAULT_LIMITS = RegistryLimits()


class SteeringRegistry:
    """Named modules and global steering of one engine, checked against what the engine serves.

    Every change counts the epoch up and applies to requests admitted after it; one that changes nothing does neither.
    All methods may be called from any thread.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        store: Store | None = None,
        limits: RegistryLimits = DEFAULT_LIMITS,
        model_name: str | None = None,
    ) -> None:
        """Check what the store has already. ``model_name``: what metrics call the engine; None for none.

        Raises:
            SteeringError: its global steering is not for this engine, or cannot be read.
        """
        self._capabilities = capabilities
        self._store = MemoryStore() if store is None else store
        self._limits = limits
        self._admission = RequestComposer()
        self._model_name = model_name
        self._shown: Snapshot | None = None
        self._check_global(self.snapshot())

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
        """Let ``name`` mean a new module, or a new version of it; requests that hold the old one keep it.

        Args:
            name: 1 to 64 ASCII letters, digits, dots, dashes and underscores.
            base, prefill, decode: ``{point: {layer: vector | {"vector": ..., "scale": ...}}}``, added to every token,
                to prompt tokens, to generated tokens. Vectors are ``[H]``, in any form that a request may bring.
            edits: a list of :class:`vllm_steer.Edit` or of dicts of its arguments, after the tiers.
            probes: ``{name: vector}``, for captures to project on.
            description, model, provenance: for people to read.

        Raises:
            SteeringError: something is wrong, or this engine cannot serve it.
        """
        content = {"base": base, "prefill": prefill, "decode": decode, "edits": edits, "probes": probes}
        about = parse_about({"description": description, "model": model, "provenance": provenance})
        return self.register_module(name, parse_module(content), about)

    def register_file(self, name: str, source: str | Path | bytes) -> ModuleInfo:
        """Register the module in a safetensors file, given by its path or as its bytes.

        Raises:
            SteeringError: it is no such file, or what is in it cannot be served.
        """
        return self.register_module(name, *_of_file(source))

    def ensure_file(self, name: str, path: str | Path) -> None:
        """Register a file unless ``name`` has that version already, be it current or not: for the start of a server.

        What the registry has lost of a current version is there again.
        """
        module, about = _of_file(path)
        snapshot = self.snapshot()
        digests = [version.digest for version in snapshot.index.modules.get(read_name(name, "name"), ())]
        lost = module.digest in snapshot.problems and digests[-1:] == [module.digest]
        if module.digest not in digests or lost:
            with audit.coming_from(audit.START):
                self.register_module(name, module, about)

    def register_module(self, name: str, module: Module, about: About) -> ModuleInfo:
        """As `register`, of a module that is parsed."""
        name = read_name(name, "name")
        self._capabilities.check(module.program, None)
        check_magnitude(module.program, self._limits.norm)
        if module.width != self._capabilities.hidden_size:
            raise SteeringError(
                "probes", f"are {module.width} wide, but this model's hidden size is {self._capabilities.hidden_size}"
            )
        snapshot = self._change(
            "register",
            name,
            lambda old: old.with_module(name, module, about, time.time(), self._limits),
            lambda _: [module.digest],
        )
        return describe_module(snapshot, Reference(name, module.digest))

    def list(self) -> ModuleList:
        """All modules, by name."""
        return describe_list(self.snapshot())

    def get(self, reference: str | Reference, *, data: bool = False) -> ModuleInfo:
        """One module, ``"calm"`` or ``"calm@sha256:..."``, with its vectors if ``data``.

        Raises:
            UnknownModuleError: there is none.
        """
        return describe_module(self.snapshot(), parse_reference(reference, "name"), data=data)

    def delete(self, reference: str | Reference) -> Deleted:
        """Forget a name, or that version of it; requests that hold it keep it.

        Raises:
            UnknownModuleError: there is none.
        """
        wanted = parse_reference(reference, "name")
        if wanted.name is None:
            raise SteeringError("name", "is missing: what is deleted is a name, or a version of one")
        name, deleted = wanted.name, builtins.list[str]()

        def without(old: Snapshot) -> Snapshot:
            old.find(wanted, "name")
            digests = [version.digest for version in old.index.modules[name]]
            deleted[:] = [digest for digest in digests if wanted.digest in (None, digest)]
            return old.without(name, wanted.digest)

        return Deleted(epoch=self._change("delete", name, without, lambda _: deleted).epoch, name=name, deleted=deleted)

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
        """Steer every request admitted from now on, ahead of what the request itself brings.

        What is not named stays: a vector takes the place of what its site had in that tier; ``edits`` and ``modules``
        are lists, each taken as a whole. The order is ``modules``, ``base``, ``prefill``, ``decode``, ``edits``.

        Args:
            base, prefill, decode, edits: as of `register`.
            modules: a list as in ``steering_modules``; they are applied as they are now.
            replace: clear everything that is not named.

        Raises:
            SteeringError: something is wrong, or this engine cannot serve it for prompts of every length.
        """
        content = {"base": base, "prefill": prefill, "decode": decode, "edits": edits}
        given = {key: value for key, value in content.items() if value is not None}
        if not given and modules is None:
            raise SteeringError("set", f"names nothing; give one of {', '.join(content)}, modules; or use clear")
        change = parse_module(given) if given else Module()
        references = None if modules is None else parse_references(modules, "modules")

        def with_steering(old: Snapshot) -> Snapshot:
            steering = old.index.steering
            uses: tuple[Use, ...] = () if replace else steering.modules
            if references is not None:
                uses = tuple(old.find(each, f"modules[{i}]")[0] for i, each in enumerate(references))
            before = Module() if replace or steering.content is None else old.content(steering.content)
            new = old.with_steering(uses, before.merged(change), self._limits)
            self._check_global(new)
            return new

        return describe_steering(self._change("set", None, with_steering, _steering_digests))

    def clear(self) -> GlobalSteering:
        """Steer nothing but what requests bring, from the next request on."""
        cleared = self._change(
            "clear", None, lambda old: old.with_steering((), Module(), self._limits), _steering_digests
        )
        return describe_steering(cleared)

    def status(self, *, data: bool = False) -> GlobalSteering:
        """What is applied to every request, with its vectors if ``data``."""
        return describe_steering(self.snapshot(), data=data)

    def snapshot(self) -> Snapshot:
        """The newest state, also where another process has made it; raises RegistryUnavailableError."""
        snapshot = self._store.refresh() if self._store.is_stale() else self._store.snapshot
        self._show(snapshot)
        return snapshot

    def is_stale(self) -> bool:
        """Whether `snapshot` would have to read files."""
        return self._store.is_stale()

    def admit(self, extra: Mapping[str, Any], snapshot: Snapshot | None = None) -> Mapping[str, Any]:
        """``extra_args`` of a request as the engine gets them, by ``snapshot`` or the newest state; see
        `RequestComposer.compose`."""
        return self._admission.compose(extra, self.snapshot() if snapshot is None else snapshot)

    def _change(
        self,
        event: str,
        name: str | None,
        make: Callable[[Snapshot], Snapshot],
        digests: Callable[[Snapshot], builtins.list[str]],
    ) -> Snapshot:
        """The state after a change that is kept and recorded; ``digests``: of what was changed, by the new state."""
        before = 0

        def change(old: Snapshot) -> Snapshot:
            nonlocal before
            before = old.epoch
            return make(old)

        after = self._store.change(change)
        audit.record(event, before=before, after=after.epoch, name=name, digests=digests(after))
        self._show(after)
        return after

    def _show(self, snapshot: Snapshot) -> None:
        if snapshot is not self._shown and self._model_name is not None:
            self._shown = snapshot
            set_registry_gauges(
                self._model_name,
                modules=len(snapshot.index.modules),
                num_bytes=sum(module.num_bytes for module in snapshot.contents.values()),
                epoch=snapshot.epoch,
                global_steering=snapshot.steering_digest is not None,
            )

    def _check_global(self, snapshot: Snapshot) -> None:
        """Global steering meets prompts of every length: what fails for one fails for the shortest or the longest."""
        program = snapshot.steering_program
        if program is None:
            return
        check_magnitude(program, self._limits.norm)
        for prompt_len in (None, 1, max(self._capabilities.max_model_len - 1, 1)):
            try:
                self._capabilities.check(program, prompt_len)
            except SteeringError as error:
                raise SteeringError(error.field, f"{error.problem} (global steering applies to every prompt)") from None


def _steering_digests(snapshot: Snapshot) -> list[str]:
    return [] if snapshot.steering_digest is None else [snapshot.steering_digest]


def _of_file(source: str | Path | bytes) -> tuple[Module, About]:
    if isinstance(source, bytes):
        return read_module(source)
    try:
        return read_module(Path(source).read_bytes())
    except OSError as error:
        raise SteeringError("file", f"{source} cannot be read: {error.strerror or error}") from None
    except SteeringError as error:
        raise SteeringError(f"{source}: {error.field}", error.problem) from None
