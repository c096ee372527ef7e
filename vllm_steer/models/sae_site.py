# SPDX-License-Identifier: Apache-2.0
"""The place in a model for which an autoencoder was made, as its files name it.

SAELens and Gemma Scope 2 name the hook point, the layer and the model in the configuration. sparsify and Gemma Scope
name the place in the path only: ``layers.10`` is sparsify's name of a folder, and ``gemma-scope-2b-pt-res/layer_20`` is
a repository of Gemma Scope with one of its folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_steer.models.sae_files import SaeFiles, open_files
from vllm_steer.program.feature import SaeSite
from vllm_steer.request.references import ANY_SITE_FLAG
from vllm_steer.request.scalars import is_integer
from vllm_steer.site_names import find_foreign_site

_HOOK_KEYS = ("hook_name", "hook_point", "hf_hook_point_in")
_LAYER_KEYS = ("hook_layer", "hook_point_layer")
_SCOPE_POINTS: Mapping[str, str] = {"res": "resid_post", "mlp": "hook_mlp_out", "att": "attn.hook_z"}
"""Names of hook points by the end of the names of Gemma Scope's repositories."""
_SCOPE_FOLDER, _SCOPE_REPOSITORY = re.compile(r"layer_([0-9]{1,4})"), re.compile(r"gemma-scope-.*-(res|mlp|att)\b")
_SNAPSHOT = re.compile(r"models--(?:[^/]+--)?([^/]+)/snapshots/[^/]+/?\Z")
"""Folder of a model in the cache of the Hugging Face hub."""
_OTHER_NAMES: Mapping[str, str] = {"gpt2-small": "gpt2"}
"""Names of models by the names that TransformerLens has for them."""


def read_site(folder: str, field: str) -> SaeSite:
    """Return the site that the files in a folder name; its parts are None where they name none.

    Raises:
        SteeringError: The folder has no autoencoder.
    """
    files = open_files(folder, field)
    name, layer = _named(files, Path(folder).absolute())
    found = None if name is None else find_foreign_site(name)
    if found is not None and found.layer is not None:
        layer = found.layer
    if name is None and layer is None:
        return SaeSite()
    shown = name or f"layer {layer}"
    if name is not None and layer is not None and str(layer) not in name:
        shown = f"{name}, layer {layer}"
    return SaeSite(
        name=shown,
        point=None if found is None else found.point,
        layer=layer,
        known=name is None or (found is not None and found.point is not None),
        exact=found is not None and found.name.accepted and layer is not None,
    )


def check_model(folder: str, field: str, models: Iterable[str]) -> None:
    """Raise SteeringError if an autoencoder was made for a model with another name than each of ``models``."""
    files = open_files(folder, field)
    made_for = next((each["model_name"] for each in files.described if isinstance(each.get("model_name"), str)), None)
    names = list(dict.fromkeys(models))
    if made_for and plain_name(made_for) not in map(plain_name, names):
        raise files.refuse(
            f"was made for the model {made_for[:200]!r}, not for {' or '.join(map(repr, names))}; serve that model, "
            f"give its name with --served-model-name, or add {ANY_SITE_FLAG}"
        )


def models_of(model_config: Any) -> list[str]:
    """Return the names of an engine's model."""
    served = model_config.served_model_name
    return [str(model_config.model), *([served] if isinstance(served, str) else served or ())]


def _named(files: SaeFiles, folder: Path) -> tuple[str | None, int | None]:
    """Return the name of the hook point and the layer beside it."""
    described = files.described
    name = next((each[key] for each in described for key in _HOOK_KEYS if isinstance(each.get(key), str)), None)
    layer = next((int(each[key]) for each in described for key in _LAYER_KEYS if is_integer(each.get(key))), None)
    if files.form == "sparsify" and name is None:
        found = find_foreign_site(folder.name)
        name = folder.name if found is not None and found.layer is not None else None
    elif files.form == "gemma-scope":
        layers = [match for match in map(_SCOPE_FOLDER.fullmatch, folder.parts) if match]
        repositories = [match for match in map(_SCOPE_REPOSITORY.search, folder.parts) if match]
        layer = int(layers[-1][1]) if layers else None
        name = _SCOPE_POINTS[repositories[-1][1]] if repositories else None
    return name, layer


def plain_name(name: str) -> str:
    """Return the name of a model without its owner or folder, in lower case."""
    cached = _SNAPSHOT.search(name)
    plain = (cached[1] if cached else name.rstrip("/").rpartition("/")[2]).lower().replace("_", "-")
    return _OTHER_NAMES.get(plain, plain)
