# SPDX-License-Identifier: Apache-2.0
"""Names of sites in other libraries, with our hook points and layers.

One table serves error messages, docs/reference/points.md and parsers that accept these names.
"""

import re
from dataclasses import dataclass

from vllm_steer.points import PointName


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


_SHIFT = (
    "hidden_states[0] is the embedding (pre_attn of layer 0), hidden_states[i] is post_block of layer i - 1, "
    "and the last entry is after the final norm, which is not a hook point"
)

FOREIGN_NAMES: tuple[ForeignName, ...] = (
    ForeignName(
        "TransformerLens",
        ("blocks.{i}.hook_resid_pre", "hook_resid_pre", "resid_pre.{i}", "resid_pre"),
        "pre_attn",
    ),
    ForeignName(
        "TransformerLens", ("blocks.{i}.hook_attn_out", "hook_attn_out", "attn_out.{i}", "blocks.{i}.attn"), "attn_out"
    ),
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
    ForeignName(
        "TransformerLens", ("blocks.{i}.hook_mlp_out", "hook_mlp_out", "mlp_out.{i}", "blocks.{i}.mlp"), "mlp_out"
    ),
    ForeignName(
        "TransformerLens",
        ("blocks.{i}.hook_resid_post", "hook_resid_post", "resid_post.{i}", "resid_post", "blocks.{i}"),
        "post_block",
    ),
    ForeignName("TransformerLens", ("hook_embed", "embed"), "pre_attn", layer=0),
    ForeignName("nnterp", ("layers_input.{i}", "layers_input"), "pre_attn"),
    ForeignName("nnterp", ("attentions_output.{i}", "attentions_output"), "attn_out"),
    ForeignName("nnterp", ("mlps_input.{i}", "mlps_input"), "mlp_in"),
    ForeignName("nnterp", ("mlps_output.{i}", "mlps_output"), "mlp_out"),
    ForeignName("nnterp", ("layers_output.{i}", "layers_output"), "post_block"),
    ForeignName("nnterp", ("token_embeddings",), "pre_attn", layer=0),
    ForeignName("HF Transformers", ("hidden_states.{i}", "hidden_states"), "post_block", offset=-1, note=_SHIFT),
    ForeignName("HF Transformers", ("layers.{i}", "layers.{i}.output", "layers.{i}.output.0", "h.{i}"), "post_block"),
    ForeignName("HF Transformers", ("embed_tokens", "wte"), "pre_attn", layer=0),
    ForeignName("nnsight", ("layers.{i}.input", "h.{i}.input"), "pre_attn"),
    ForeignName(
        "nnsight",
        ("layers.{i}.self_attn.output.0", "layers.{i}.self_attn.output", "layers.{i}.self_attn", "self_attn"),
        "attn_out",
        note="with Llama's names; in models with a norm after the branch, the norm's output",
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
        note="with Llama's names; in models with a norm after the branch, the norm's output",
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


@dataclass(frozen=True, slots=True)
class ForeignSite:
    """A name of another library that was found in the table."""

    name: ForeignName
    point: PointName | None
    """Our hook point; None if the place is not a hook point."""
    layer: int | None
    """Our layer number; None if the name does not state one."""

    @property
    def explanation(self) -> str:
        """Our point and layer, as part of an error message."""
        if self.point is None:
            return self.name.note
        if self.name.offset and self.layer is None:
            return self.name.note
        where = self.point if self.layer is None else f"{self.point} of layer {self.layer}"
        return "; ".join(part for part in (f"it is {where} here", self.name.note) if part)


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
    words = _MODEL_PREFIX.sub("", _INDEX.sub(r".\1", text.strip()), count=1).split(".")
    numbered = next((i for i, word in enumerate(words) if _NUMBER.fullmatch(word)), None)
    number = None if numbered is None else int(words[numbered])
    if numbered is not None:
        words[numbered] = "{i}"
    name = _NAMES.get(".".join(words))
    if name is None:
        return None
    if name.offset and number == 0:  # hidden_states[0]
        return ForeignSite(name, "pre_attn", 0)
    layer = name.layer if number is None or number < 0 else number + name.offset
    return ForeignSite(name, name.point, layer)


_NAMES = {template: name for name in FOREIGN_NAMES for template in name.templates}
