# SPDX-License-Identifier: Apache-2.0
"""Names of sites in other libraries, with our hook points and layers.

One table serves the parsers of request fields, :func:`site`, error messages and docs/reference/points.md.
"""

import difflib
import re
from dataclasses import dataclass

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES, PointName


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A family of names of one place in a model."""

    library: str
    templates: tuple[str, ...]
    """Spellings; ``{i}`` is the layer number. :func:`find_foreign_site` also accepts ``.3`` written as ``[3]`` and the
    prefixes of HF model classes, such as ``model.``."""
    point: PointName | None
    """Our hook point; None if the place is not a hook point."""
    offset: int = 0
    """Our layer number minus theirs."""
    layer: int | None = None
    """Our layer number, if the name has no layer because the place exists once."""
    note: str = ""
    """Differences to our point."""

    @property
    def accepted(self) -> bool:
        """Whether request fields accept these names: they mean exactly our point, in every model."""
        return self.point is not None and not self.note


_EMBEDDING = "the embedding, without the scaling or the position embeddings that some models add to it"
_SHIFT = (
    "hidden_states[0] is the embedding (pre_attn of layer 0), hidden_states[i] is post_block of layer i - 1, "
    "and the last entry is after the final norm, which is not a hook point"
)

_POST_NORM = "in models with a norm after the branch, the norm's output"

FOREIGN_NAMES: tuple[ForeignName, ...] = (
    ForeignName(
        "TransformerLens",
        ("blocks.{i}.hook_resid_pre", "hook_resid_pre", "resid_pre.{i}", "resid_pre"),
        "pre_attn",
    ),
    ForeignName("TransformerLens", ("blocks.{i}.hook_attn_out", "hook_attn_out", "attn_out.{i}"), "attn_out"),
    ForeignName("TransformerLens", ("blocks.{i}.attn",), "attn_out", note=_POST_NORM),
    ForeignName(
        "TransformerLens",
        ("blocks.{i}.hook_resid_mid", "hook_resid_mid", "resid_mid.{i}", "resid_mid"),
        "post_attn",
    ),
    ForeignName(
        "TransformerLens",
        ("blocks.{i}.hook_mlp_in", "hook_mlp_in"),
        "post_attn",
        note="hook_mlp_in is the stream before the norm; mlp_in here is the norm's output",
    ),
    ForeignName(
        "TransformerLens",
        ("blocks.{i}.ln2.hook_normalized", "ln2.hook_normalized"),
        "mlp_in",
        note="mlp_in includes the norm's weight",
    ),
    ForeignName("TransformerLens", ("blocks.{i}.hook_mlp_out", "hook_mlp_out", "mlp_out.{i}"), "mlp_out"),
    ForeignName("TransformerLens", ("blocks.{i}.mlp",), "mlp_out", note=_POST_NORM),
    ForeignName(
        "TransformerLens",
        ("blocks.{i}.hook_resid_post", "hook_resid_post", "resid_post.{i}", "resid_post", "blocks.{i}"),
        "post_block",
    ),
    ForeignName("TransformerLens", ("hook_embed", "embed"), "pre_attn", layer=0, note=_EMBEDDING),
    ForeignName("nnterp", ("layers_input.{i}", "layers_input"), "pre_attn"),
    ForeignName("nnterp", ("attentions_output.{i}", "attentions_output"), "attn_out", note=_POST_NORM),
    ForeignName("nnterp", ("mlps_input.{i}", "mlps_input"), "mlp_in"),
    ForeignName("nnterp", ("mlps_output.{i}", "mlps_output"), "mlp_out", note=_POST_NORM),
    ForeignName("nnterp", ("layers_output.{i}", "layers_output"), "post_block"),
    ForeignName("nnterp", ("token_embeddings",), "pre_attn", layer=0, note=_EMBEDDING),
    ForeignName("HF Transformers", ("hidden_states.{i}", "hidden_states"), "post_block", offset=-1, note=_SHIFT),
    ForeignName("HF Transformers", ("layers.{i}", "layers.{i}.output", "layers.{i}.output.0", "h.{i}"), "post_block"),
    ForeignName("HF Transformers", ("embed_tokens", "wte"), "pre_attn", layer=0, note=_EMBEDDING),
    ForeignName("nnsight", ("layers.{i}.input", "h.{i}.input"), "pre_attn"),
    ForeignName(
        "nnsight",
        ("layers.{i}.self_attn.output.0", "layers.{i}.self_attn.output", "layers.{i}.self_attn", "self_attn"),
        "attn_out",
        note=f"with Llama's names; {_POST_NORM}",
    ),
    ForeignName("nnsight", ("layers.{i}.post_attention_layernorm.input",), "post_attn", note="with Llama's names"),
    ForeignName(
        "nnsight",
        ("layers.{i}.mlp.input", "layers.{i}.post_attention_layernorm.output"),
        "mlp_in",
        note="with Llama's names",
    ),
    ForeignName(
        "nnsight",
        ("layers.{i}.mlp.output", "layers.{i}.mlp", "h.{i}.mlp"),
        "mlp_out",
        note=f"with Llama's names; {_POST_NORM}",
    ),
    ForeignName("vllm-lens", ("residual_stream.{i}", "residual_stream", "output_residual_stream"), "post_block"),
    ForeignName(
        "TransformerLens",
        ("ln_final", "ln_final.hook_normalized", "norm", "lm_head", "unembed", "logits"),
        None,
        note="places after the last block are not hook points; the last one is post_block of the last layer",
    ),
    ForeignName(
        "TransformerLens",
        tuple(
            f"{prefix}hook_{name}"
            for prefix in ("blocks.{i}.attn.", "")
            for name in ("q", "k", "v", "z", "pattern", "attn_scores", "result")
        ),
        None,
        note="places inside attention are not hook points; its output is attn_out",
    ),
    ForeignName(
        "TransformerLens",
        ("blocks.{i}.mlp.hook_pre", "blocks.{i}.mlp.hook_post", "hook_pre", "hook_post"),
        None,
        note="places inside the MLP are not hook points; its input is mlp_in and its output mlp_out",
    ),
)
"""Known names. Entries that differ only in the library's prefix are listed once."""

_INDEX = re.compile(r"\[(-?[0-9]{1,9})\]")
_MODEL_PREFIX = re.compile(r"\A(?:(?:model|base_model|language_model|transformer|gpt_neox|decoder)\.)+")
_NUMBER = re.compile(r"-?[0-9]{1,9}")
_MAX_CHARS = 128
_LIKENESS = 0.92
"""Least likeness of a misspelling. Names of neighbouring places such as ``hook_resid_pre`` and ``hook_resid_post``, and
``layers_input`` and ``layers_output``, are less alike."""


@dataclass(frozen=True, slots=True)
class ForeignSite:
    """A name of another library that was found in the table."""

    name: ForeignName
    point: PointName | None
    """Our hook point; None if the place is not a hook point."""
    layer: int | None
    """Our layer number; None if the name does not state one, or a negative one."""
    number: int | None = None
    """The number in the name."""

    @property
    def problem(self) -> str:
        """Reason why request fields refuse the name, and the name to write, as the end of an error message."""
        if self.number is not None and self.number < 0:
            return "has a negative number; layers count from 0"
        if self.point is None or (self.name.offset and self.layer is None):
            return f"is not a hook point; {self.name.note}"
        where = self.point if self.layer is None else f"{self.point} of layer {self.layer}"
        if self.number == 0 and self.name.offset:
            return f"is {where} here; write that"
        if self.name.offset:
            return (
                f"is {where} here, but after the final norm, and no hook point, if it is the last entry; write {where}"
            )
        return f"does not mean exactly a hook point; the nearest is {where}: {self.name.note}"


def find_foreign_site(text: str) -> ForeignSite | None:
    """Return the site that has a name in another library.

    Args:
        text: For example ``blocks.3.hook_resid_post``, ``model.layers[3].output``, ``hidden_states[4]`` or
            ``resid_post``.

    Returns:
        The site; None if the table does not have the name.
    """
    if len(text) > _MAX_CHARS:
        return None
    template, number = _split(text)
    name = _NAMES.get(template)
    if name is None:
        return None
    if name.offset and number == 0:  # hidden_states[0]
        return ForeignSite(name, "pre_attn", 0, number)
    layer = name.layer if number is None or number < 0 else number + name.offset
    return ForeignSite(name, name.point, layer, number)


def similar_name(text: str) -> str | None:
    """Return the name in another library of which a text could be a misspelling, with the text's number; else None.

    Args:
        text: For example ``blocks.3.hook_resid_pst``, for which this is ``blocks.3.hook_resid_post``.
    """
    if len(text) > _MAX_CHARS:  # comparing takes quadratic time
        return None
    template, number = _split(text)
    numbered = [each for each in _NAMES if ("{i}" in each) == (number is not None)]
    found = difflib.get_close_matches(template, numbered, 1, _LIKENESS)
    return found[0].replace("{i}", str(number)) if found else None


def site(name: str, *, num_layers: int | None = None, parallel: bool = False) -> tuple[PointName, int]:
    """Return the hook point and the layer of a site, given by a name of this or of another library.

    Args:
        name: For example ``blocks.10.hook_resid_post``, ``resid_post.10``, ``model.layers.10``, ``layers_output[10]``,
            ``hidden_states[11]`` or ``post_block.10``.
        num_layers: Layers of the model. With it, layers that the model lacks are refused, and so is the last entry of
            ``hidden_states``, which is after the final norm.
        parallel: Whether the model computes attention and MLP in parallel. Such models have no stream between them.

    Returns:
        The point and the layer, from 0.

    Raises:
        SteeringError: The name is unknown, has no layer, or means a place that is not a hook point.

    Examples:
        >>> from vllm_steer import site
        >>> site("hidden_states[11]", num_layers=12)
        ('post_block', 10)
    """
    if not isinstance(name, str):
        raise SteeringError("site", f"must be the name of a site, not {type(name).__name__}")
    shown = repr(name[:_MAX_CHARS])
    found = find_foreign_site(name)
    template, number = _split(name[:_MAX_CHARS])
    own = next((point for point in POINT_NAMES if template == f"{point}.{{i}}"), None)
    if found is None and own is None:
        similar = similar_name(name)
        if similar is not None:
            raise SteeringError("site", f"{shown} is not the name of a site; did you mean {similar}?")
        hint = "write {point}.{layer} such as post_block.10, or a name as in other libraries: blocks.10.hook_resid_post"
        raise SteeringError("site", f"{shown} is not the name of a site; {hint}")
    if number is not None and number < 0:
        raise SteeringError("site", f"{shown} has a negative number; layers count from 0")
    if found is not None and found.name.point is not None and found.name.note and not found.name.offset:
        raise SteeringError("site", f"{shown} {found.problem}")
    if found is not None and found.name.layer is None and found.name.point is not None and number is None:
        raise SteeringError("site", f"{shown} has no layer; write it as in {name}.10 or {name}[10]")
    point, layer = (own, number) if found is None else (found.point, found.layer)
    if point is None or layer is None:
        raise SteeringError("site", f"{shown} {'has no layer' if found is None else found.problem}")
    if found is not None and found.name.offset and number == num_layers:
        raise SteeringError(
            "site",
            f"{shown} is after the final norm, which is not a hook point; the stream before that norm is post_block of "
            f"layer {layer}",
        )
    if num_layers is not None and layer >= num_layers:
        raise SteeringError("site", f"{shown} is beyond the model's {num_layers} layers")
    if parallel and point == "post_attn":
        raise SteeringError(
            "site", f"{shown} does not exist in this model, which computes attention and MLP in parallel"
        )
    return point, layer


def _split(text: str) -> tuple[str, int | None]:
    """Return the template of a name, with ``{i}`` in place of the first number, and that number."""
    words = _MODEL_PREFIX.sub("", _INDEX.sub(r".\1", text.strip()), count=1).split(".")
    numbered = next((i for i, word in enumerate(words) if _NUMBER.fullmatch(word)), None)
    number = None if numbered is None else int(words[numbered])
    if numbered is not None:
        words[numbered] = "{i}"
    return ".".join(words), number


_NAMES = {template: name for name in FOREIGN_NAMES for template in name.templates}
