# SPDX-License-Identifier: Apache-2.0
"""Tests of composing requests: caching, invalidation and the description of what was applied."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.registry.modules import CAPABILITIES, content, module, registry, vector
from tests.server.fakes import HIDDEN
from vllm_steer import SamplingParams, SteeringError
from vllm_steer.limits import MAX_DIRECTIONS
from vllm_steer.params import APPLIED_KEY, CAPTURE_KEY, MODULES_KEY, PROGRAM_KEY, program_of, strip_for_engine
from vllm_steer.points import POINT_NAMES
from vllm_steer.program import Program
from vllm_steer.registry import composer
from vllm_steer.registry.composer import resolve_probes
from vllm_steer.registry.errors import UnknownModuleError
from vllm_steer.registry.index import ModuleVersion, RegistryIndex
from vllm_steer.registry.metadata import ModuleMetadata
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.registry.schema import SteeringApplied
from vllm_steer.registry.snapshot import Snapshot
from vllm_steer.request import Projection, Reference, parse_capture

PROBED = {"memory": {"hooks": {"post_block": [1]}, "reduce": {"probes": ["calm/joy", "calm/anger"]}}}


@pytest.fixture
def compositions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record each composition that is not served from the cache."""
    compositions: list[int] = []
    real = composer._compose

    def counted(*args: Any) -> Any:
        compositions.append(1)
        return real(*args)

    monkeypatch.setattr(composer, "_compose", counted)
    return compositions


def extra(**fields: Any) -> dict[str, Any]:
    return dict(SamplingParams(**fields).extra_args or {})


def test_equal_requests_are_composed_once(compositions: list[int]) -> None:
    """Catches directions that are looked up, hashed and encoded again for every request."""
    steering = registry()
    steering.register("calm", **content())
    first, second = (steering.compose({**extra(capture=PROBED), "mine": i}) for i in range(2))
    assert len(compositions) == 1
    assert all(first[key] is second[key] for key in (PROGRAM_KEY, CAPTURE_KEY))
    assert (first["mine"], second["mine"]) == (0, 1)
    steering.compose(extra(capture=PROBED, steering_modules=["calm"]))
    steering.compose(extra(steering_modules=["calm"]))
    assert len(compositions) == 3


def test_lens_of_all_layers_reads_each() -> None:
    """Catches a lens with ``layers="all"`` that leaves out a layer of the model."""
    lens = {"lens": {"tokens": [7]}, "point": "post_block", "layers": "all"}
    program = program_of(SimpleNamespace(extra_args=registry().compose(extra(readouts={"a": lens}))))
    assert program is not None
    assert program.readouts[0].layers == tuple(range(CAPABILITIES.num_layers))


def test_cache_follows_the_registry() -> None:
    """Catches requests composed with an outdated module, or without global steering."""
    steering = registry()
    steering.register("calm", **content())
    wanted = extra(steering_modules=["calm"], capture=PROBED)
    before, again = (steering.compose(wanted)[PROGRAM_KEY] for _ in range(2))
    assert before == again
    steering.register("calm", **content(seed=50))
    renewed = steering.compose(wanted)[PROGRAM_KEY]
    assert renewed != before
    steering.set(modules=["calm"])
    assert steering.compose(wanted)[PROGRAM_KEY] != renewed
    steering.clear()
    assert steering.compose(wanted)[PROGRAM_KEY] == renewed


SITE = {"point": "pre_attn", "layer": 2}
PLACE = {"point": "post_block", "layer": 1}


def composed_readout(registered: Any, readout: dict[str, Any], **fields: Any) -> Any:
    params = SamplingParams(readouts={"r": readout}, **fields)
    composed = registered.compose(dict(params.extra_args))
    CAPABILITIES.check(program := Program.from_bytes(composed[PROGRAM_KEY]), 4, 8)
    return program.readouts[0]


@pytest.mark.parametrize("probe", ["whole", "mlp"])
def test_a_readout_takes_all_of_a_probe(probe: str) -> None:
    """Catches a probe that loses its bias, sigmoid, point or layer: its scores look plausible and are wrong."""
    steering = registry()
    hidden = {"weights": [vector(1), vector(2)], "outputs": [1.0, 2.0], "bias": 0.75, "sigmoid": True, **SITE}
    steering.register("calm", probes={**content()["probes"], "mlp": hidden})
    named = composed_readout(steering, {"probe": f"calm/{probe}"})
    weights = hidden if probe == "mlp" else vector(6)
    inline = {key: hidden[key] for key in ("weights", "outputs")} if probe == "mlp" else weights
    sent = {"probe": inline, "bias": 0.75, "sigmoid": True, **SITE}
    assert named == composed_readout(steering, sent)
    assert named == composed_readout(steering, {**sent, "probe": f"calm/{probe}"})
    for key, value in {"bias": 0.5, "sigmoid": False, "point": "post_attn", "layer": 1}.items():
        with pytest.raises(SteeringError, match="was registered with") as refused:
            composed_readout(steering, {**sent, "probe": f"calm/{probe}", key: value})
        assert refused.value.field == f"readouts.r.{key}" and str(hidden[key]) in refused.value.problem
    info = steering.get("calm").content.probes[probe]
    assert (info.bias, info.sigmoid, info.point, info.layer) == (0.75, True, "pre_attn", 2)


def test_what_a_probe_lacks_is_given_by_the_request() -> None:
    """Catches a direction that cannot be read any more, and one that is read at an invented site."""
    steering = registry()
    steering.register("calm", **content())
    given = composed_readout(steering, {"probe": "calm/joy", "bias": 2.0, "sigmoid": True, **PLACE})
    assert (given.bias, given.sigmoid, given.layer) == (2.0, True, 1)
    for key in ("point", "layer"):
        with pytest.raises(SteeringError, match="registered without it") as refused:
            composed_readout(steering, {"probe": "calm/joy", **{k: v for k, v in PLACE.items() if k != key}})
        assert refused.value.field == f"readouts.r.{key}"
    # A gate on a probe whose site is not known before: the edit must come behind it.
    edit = {"kind": "add", "point": "post_block", "vector": vector(1), "when": {"readout": "r", "above": 0.5}}
    assert composed_readout(steering, {"probe": "calm/whole"}, steering=[{**edit, "layers": 2}])
    with pytest.raises(SteeringError, match="computed before the readout at pre_attn of layer 2") as refused:
        composed_readout(steering, {"probe": "calm/whole"}, steering=[{**edit, "layers": 1}])
    assert refused.value.field == "steering[0].when.window"


SAE: dict[str, Any] = {"sae": "s"}
FEATURE = {"kind": "feature", "sae": "s", "feature": 1, "add": 2.0}


def with_sae(folder: Path, hook: str = "blocks.1.hook_resid_post", *, any_site: bool = False) -> SteeringRegistry:
    arrays = {"W_enc": np.ones((HIDDEN, 4)), "W_dec": np.ones((4, HIDDEN)), "b_enc": np.ones(4), "b_dec": np.ones(1)}
    folder.mkdir()
    save_file({name: array.astype("f4") for name, array in arrays.items()}, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"hook_name": hook} if hook else {}))
    return SteeringRegistry(CAPABILITIES, saes={"s": str(folder)}, sae_any_site=any_site)


def program_with(registered: SteeringRegistry, **fields: Any) -> Program:
    return Program.from_bytes(registered.compose(extra(**fields))[PROGRAM_KEY])


def test_an_autoencoder_is_served_at_its_own_site(tmp_path: Path) -> None:
    """Catches an autoencoder at a site that its own file contradicts, and a site that has to be given again."""
    steering, free = with_sae(tmp_path / "a"), with_sae(tmp_path / "b", any_site=True)
    for registered in (steering, free):
        readouts = [program_with(registered, readouts={"r": {**SAE, **site}}).readouts[0] for site in ({}, PLACE)]
        edits = [program_with(registered, steering=[{**FEATURE, **site}]).edits[0] for site in (
            {}, {"point": "post_block", "layers": 1}, {"point": "post_block"}, {"layers": [1]},
        )]  # fmt: skip
        assert len(set(edits)) == len(set(readouts)) == 1
        assert readouts[0].layers == edits[0].layers == (1,)
        assert POINT_NAMES[readouts[0].point] == POINT_NAMES[edits[0].point] == "post_block"
    for point, layer in (("post_block", 2), ("post_block", 0), ("mlp_out", 1), ("pre_attn", 1)):
        wrong: dict[str, Any] = {"readouts": {"r": {**SAE, "point": point, "layer": layer}}}
        for fields, field in (
            (wrong, "readouts.r.point"),
            ({"steering": [{**FEATURE, "point": point, "layers": layer}]}, "steering[0].point"),
        ):
            with pytest.raises(SteeringError, match=r"made for blocks.1.hook_resid_post \(post_block of layer 1") as no:
                program_with(steering, **fields)
            assert no.value.field == field and f"is {point} of layer {layer}" in no.value.problem
            assert "--steering-sae-any-site" in no.value.problem
            program_with(free, **fields)
    for layers in ([0, 1], "all"):
        with pytest.raises(SteeringError, match="made for"):
            program_with(steering, steering=[{**FEATURE, "point": "post_block", "layers": layers}])


@pytest.mark.parametrize(
    ("hook", "words"), [("", "do not name its site"), ("blocks.1.ln1.hook_normalized", "hook_normalized, which is not")]
)
def test_a_site_that_no_file_names_is_missing(hook: str, words: str, tmp_path: Path) -> None:
    """Catches a readout or an edit at an invented site, such as layer 0."""
    steering = with_sae(tmp_path / "a", hook)
    for fields, field in (({"readouts": {"r": SAE}}, "readouts.r"), ({"steering": [FEATURE]}, "steering[0]")):
        with pytest.raises(SteeringError, match=words) as refused:
            program_with(steering, **fields)
        assert refused.value.field == f"{field}.point"


def test_products_leave_out_no_bias() -> None:
    """Catches projections and captures that return products in the place of the scores of a probe."""
    steering = registry()
    steering.register("calm", **content())
    wrong = [
        ({"readouts": {"r": {"projections": ["calm/whole"], **SITE}}}, "readouts.r.projections[0]", "with a bias"),
        ({"readouts": {"r": {"projections": ["calm/whole"], **PLACE}}}, "readouts.r.point", "point 'pre_attn'"),
        ({"readouts": {"r": {"probe": "calm/whole", "cosine": True}}}, "readouts.r.cosine", "bias or a sigmoid"),
    ]
    hooks_and_words = (
        ({"pre_attn": [2]}, "with a bias"),
        ({"pre_attn": [1]}, "layer 2"),
        ({"pre_attn": "all"}, "layer 2"),
    )
    for hooks, words in hooks_and_words:
        capture = {"memory": {"hooks": hooks, "reduce": {"probes": ["calm/whole"]}}}
        field = "capture.memory.reduce.probes[0]" + (".layer" if hooks == {"pre_attn": [1]} else "")
        wrong.append(({"capture": capture}, field, words))
    for fields, field, words in wrong:
        with pytest.raises(SteeringError) as refused:
            steering.compose(extra(**fields))
        assert (refused.value.field, words in refused.value.problem) == (field, True), refused.value


def test_large_requests_are_not_cached(compositions: list[int]) -> None:
    """Catches a cache that fills up with vectors, which rarely repeat."""
    steering = registry()
    steering.register("calm", **content())
    wanted = extra(steering_vectors={"post_block": {i: vector(i) for i in range(4)}}, steering_modules=["calm"])
    size = len(wanted[PROGRAM_KEY])
    for small, times in ((size, 1), (size - 1, 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(composer, "_MAX_CACHED_BYTES", small)
            compositions.clear()
            for _ in range(2):
                steering.compose(wanted)
            assert len(compositions) == times


@pytest.mark.parametrize("key", [PROGRAM_KEY, MODULES_KEY, CAPTURE_KEY])
def test_rejects_forged_keys_repeatedly(key: str) -> None:
    """Catches errors that are raised only for the first request, and unhashable cache keys."""
    steering = registry()
    steering.register("calm", **content())
    wanted = extra(steering_modules=["calm"], capture=PROBED)
    for forged in (b"\xff", ["list"], 3):
        for _ in range(2):
            with pytest.raises(SteeringError, match=key):
                steering.compose({**wanted, key: forged})


def test_engine_receives_only_the_program() -> None:
    """Catches directions that are sent to the engine twice, and changes of parameters that samples share."""
    steering = registry()
    steering.register("calm", **content())
    params = SamplingParams(n=2)
    params.extra_args = {**steering.compose(extra(steering_modules=["calm"], capture=PROBED)), "mine": 1}
    samples = [SimpleNamespace(sampling_params=params) for _ in range(2)]
    for sample in samples:
        strip_for_engine(sample)
        assert set(sample.sampling_params.extra_args) == {PROGRAM_KEY, "mine"}
        assert program_of(sample.sampling_params) is program_of(params)
    assert {CAPTURE_KEY, APPLIED_KEY} <= set(params.extra_args)
    plain = SimpleNamespace(sampling_params=SamplingParams())
    before = msgspec.msgpack.encode(plain.sampling_params)
    strip_for_engine(plain)
    assert msgspec.msgpack.encode(plain.sampling_params) == before


def test_applied_json_matches_its_schema() -> None:
    """Catches JSON that `SteeringApplied` rejects or reads differently."""
    steering = registry()
    steering.register("calm", **content())
    own = {"steering_vectors": {"post_block": {1: vector(9)}}}

    def applied(**fields: Any) -> SteeringApplied:
        data = steering.compose(extra(**fields))[APPLIED_KEY]
        there = SteeringApplied.model_validate_json(data, strict=True)
        assert there.model_dump_json(by_alias=True, exclude_defaults=True).encode() == data
        return there

    by_name, by_own = applied(steering_modules=[("calm", 0.5)]), applied(**own)
    (use,) = by_name.modules
    assert (use.name, use.scale, by_name.request, by_name.global_steering) == ("calm", 0.5, None, None)
    assert by_own.modules == () and by_own.request is not None and by_own.epoch == by_name.epoch
    assert by_name.no_effect == by_own.no_effect == ()
    nothing = {"post_block": {1: 0 * vector(9), 2: {"vector": vector(9), "scale": 0}}}
    idle = applied(steering_vectors=nothing, steering_modules=["calm", ("calm", 0.0)]).no_effect
    assert [(each.edit, each.reason) for each in idle] == [
        ("steering_vectors.post_block[2]", "zero_strength"),
        ("steering_modules[1]", "zero_strength"),
        ("steering_vectors.post_block[1]", "zero_vector"),
    ]
    digest = applied(steering_modules=[use.digest]).modules[0]
    assert (digest.name, digest.digest, digest.scale) == (None, use.digest, 1.0)
    steering.set(modules=["calm"])
    under_global = applied(**own)
    assert under_global.global_steering is not None and under_global.epoch > by_own.epoch
    assert under_global.request == by_own.request != applied(steering_vectors={"post_block": {1: vector(8)}}).request


class CountedIndex(dict[str, tuple[ModuleVersion, ...]]):
    """Mapping that counts iterations over all names."""

    looks = 0

    def values(self) -> Any:
        self.looks += 1
        return super().values()


def test_resolves_many_digests_in_one_pass() -> None:
    """Catches one pass over all versions per probe, which lets a body of some KiB block an API server."""
    about, found = ModuleMetadata(), module()
    named = CountedIndex({f"n{i}": (ModuleVersion(f"sha256:{i:064x}", about, 0.0),) for i in range(9)})
    named["x"] = (ModuleVersion(found.digest, about, 0.0),)
    snapshot = Snapshot(RegistryIndex(modules=named), {found.digest: found})
    capture = {"hooks": {"post_block": [1]}, "reduce": {"probes": [f"{found.digest}/joy"] * MAX_DIRECTIONS}}
    specs = parse_capture({"memory": capture})
    ((_, spec),) = resolve_probes(specs, snapshot)
    assert named.looks <= 1
    assert isinstance(spec.reduce, Projection)
    assert spec.reduce.directions.shape == (MAX_DIRECTIONS, HIDDEN)


def test_unknown_modules_are_listed_for_clients_that_may_list_them() -> None:
    """Catches an error without the registered names, and a list of any length."""
    error = UnknownModuleError("steering_modules[0]", "unknown module 'clam'")
    assert str(error.with_names(["terse", "calm"])) == (
        "steering_modules[0]: unknown module 'clam'; registered modules: calm, terse; did you mean calm?"
    )
    assert "registered modules: none; register one with `vllm-steer modules add NAME FILE`" in str(error.with_names([]))
    file = UnknownModuleError("steering_modules[0]", "unknown module 'calm.gguf'").with_names(["calm"])
    assert "registered modules: calm; register one with `vllm-steer modules add NAME FILE`" in str(file)
    assert str(error.with_names([f"m{i}" for i in range(100)])).endswith(", ...")


def test_a_version_that_is_not_kept_has_a_way_out() -> None:
    """Catches an error that suggests the name of the module to a client that has given it."""
    newest = ModuleVersion(module().digest, ModuleMetadata(), 0.0)
    snapshot = Snapshot(RegistryIndex(modules={"calm": (newest,)}), {})
    with pytest.raises(UnknownModuleError) as caught:
        snapshot.find(Reference("calm", f"sha256:{0:064x}"), "steering_modules[0]")
    message = str(caught.value.with_names(["calm", "terse"]))
    assert "did you mean" not in message
    assert message.endswith("omit the digest to use the newest, or register the content again")
