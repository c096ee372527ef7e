# SPDX-License-Identifier: Apache-2.0
"""Names of sites in other libraries."""

from __future__ import annotations

import re

import pytest

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINTS
from vllm_steer.site_names import FOREIGN_NAMES, find_foreign_site, similar_name, site


@pytest.mark.parametrize(
    ("name", "point", "layer"),
    [
        ("resid_post", "post_block", None),
        ("blocks.10.hook_resid_post", "post_block", 10),
        ("resid_post.10", "post_block", 10),
        ("model.layers.10", "post_block", 10),
        ("model.model.layers[10].output", "post_block", 10),
        ("model.language_model.layers.10.mlp", "mlp_out", 10),
        ("transformer.h.10", "post_block", 10),
        ("layers_output[10]", "post_block", 10),
        ("layers_input[10]", "pre_attn", 10),
        ("hidden_states[11]", "post_block", 10),
        ("hidden_states[0]", "pre_attn", 0),
        ("hidden_states[-1]", "post_block", None),
        ("hook_mlp_in", "post_attn", None),
        ("token_embeddings", "pre_attn", 0),
        ("hook_q", None, None),
    ],
)
def test_known_names(name: str, point: str | None, layer: int | None) -> None:
    """Catches a name translated to another point, and hidden_states without the shift by one."""
    site = find_foreign_site(name)
    assert site is not None
    assert (site.point, site.layer) == (point, layer)


@pytest.mark.parametrize("name", ["", "post_block", "resid", "blocks.x.hook_resid_post", "layers.1.2", "a" * 10**6])
def test_unknown_names(name: str) -> None:
    """Catches a guess, and our own names reported as foreign."""
    assert find_foreign_site(name) is None


def test_names_are_unique() -> None:
    """Catches a spelling with two meanings."""
    templates = [template for name in FOREIGN_NAMES for template in name.templates]
    assert len(templates) == len(set(templates))


def test_documented_names_are_in_the_table() -> None:
    """Catches a column of docs/reference/points.md that contradicts the table of names."""
    for point in POINTS.values():
        for library in ("TransformerLens", "nnsight"):
            name = re.split(r"[, ]", point.aliases[library])[0].replace("{i}", "7").replace("[i]", "[7]")
            site = find_foreign_site(name)
            assert site is not None, name
            assert (site.point, site.layer) == (point.name, 7), name


@pytest.mark.parametrize(
    "name",
    [
        *("blocks.10.hook_resid_post", "resid_post.10", "model.layers.10", "layers_output[10]", "layers.10"),
        *("hidden_states[11]", "post_block.10", "post_block[10]", "transformer.h.10", "residual_stream[10]"),
    ],
)
def test_spellings_of_one_site(name: str) -> None:
    """Catches a spelling that is refused or means a neighbouring layer."""
    assert site(name, num_layers=12) == ("post_block", 10)


def test_other_sites() -> None:
    """Catches the embedding's entry of hidden_states taken for the output of a block."""
    assert site("hidden_states[0]") == ("pre_attn", 0)
    assert site("blocks.2.hook_attn_out") == ("attn_out", 2)
    assert site("blocks.3.hook_resid_mid") == ("post_attn", 3)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("hidden_states[12]", "after the final norm, which is not a hook point; .* post_block of layer 11"),
        ("hidden_states[-1]", "negative"),
        ("layers.-2", "negative"),
        ("resid_post", "has no layer"),
        ("layers.12", "beyond the model's 12 layers"),
        ("blocks.1.hook_resid_mid", "attention and MLP in parallel"),
        ("blocks.1.attn.hook_z", "places inside attention"),
        ("blocks.1.hook_mlp_in", "not mean exactly"),
        ("blocks.1.attn", "attn_out of layer 1: in models with a norm after the branch"),
        ("blocks.1.mlp", "mlp_out of layer 1: in models with a norm after the branch"),
        ("attentions_output[1]", "attn_out of layer 1: in models with a norm after the branch"),
        ("mlps_output.1", "mlp_out of layer 1: in models with a norm after the branch"),
        ("embed_tokens", "without the scaling"),
        ("lm_head", "after the last block"),
        ("post_block", "not the name of a site"),
        ("layers.1.2", "not the name of a site"),
        ("x" * 10**6, "not the name of a site"),
        (7, "not int"),
    ],
)
def test_refused_sites(name: str, problem: str) -> None:
    """Catches a place that is not a hook point served as its neighbour."""
    with pytest.raises(SteeringError, match=problem):
        site(name, num_layers=12, parallel=True)


@pytest.mark.parametrize("name", ["hook_mlp_in", "blocks.1.hook_mlp_in", "attentions_output", "self_attn"])
def test_inexact_names_are_refused_with_our_point(name: str) -> None:
    """Catches an error that advises to add a layer to a name that is refused with a layer too."""
    with pytest.raises(SteeringError, match=r"the nearest is (post_attn|attn_out)") as caught:
        site(name)
    assert "has no layer" not in str(caught.value)
    assert "None" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("blocks.3.hook_resid_pst", "blocks.3.hook_resid_post"),
        ("layers_ouput[3]", "layers_output.3"),
        ("model.layers[3].outptu", "layers.3.output"),
        ("residpost", "resid_post"),
        ("layers.post_attention_layernorm.input", None),
        ("hook_resid", None),
        ("put[3]", None),
        ("something else", None),
    ],
)
def test_misspelt_names(text: str, meant: str | None) -> None:
    """Catches a suggestion of another place, a suggestion without the text's layer, and no suggestion."""
    assert similar_name(text) == meant
    with pytest.raises(SteeringError) as refusal:
        site(text)
    assert str(refusal.value).endswith(f"; did you mean {meant}?" if meant else "blocks.10.hook_resid_post")
