# SPDX-License-Identifier: Apache-2.0
"""A study as a JSON object: the arguments of `PatchingStudy` and of its sweep, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.patching.metrics import MetricName
from vllm_steer.patching.settings import Ablation
from vllm_steer.patching.study import SWEEP_DEFAULTS, PatchingStudy
from vllm_steer.request.field_types import any_of
from vllm_steer.request.matrix import MatrixForm
from vllm_steer.request.scalars import closest, shown

TextForm = Annotated[str | list[int], msgspec.Meta(description="Text, or token ids.")]
AnswerForm = Annotated[str | int | list[int], msgspec.Meta(description="Text, or one or more token ids.")]
SpanForm = Annotated[list[int], msgspec.Meta(min_length=2, max_length=2)]


class PositionForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tokens that cover a text."""

    span: Annotated[str, msgspec.Meta(description="A text in the prompt.")]
    occurrence: Annotated[int, msgspec.Meta(ge=0, description="Which occurrence, from 0.")] = 0


class StudyForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A patching study and one sweep."""

    clean: Annotated[TextForm | None, msgspec.Meta(description="The clean prompt.")] = None
    corrupt: Annotated[
        TextForm | None, msgspec.Meta(description="The corrupt prompt. Instead, give `noise` or `ablate`.")
    ] = None
    answer: Annotated[
        AnswerForm | None, msgspec.Meta(description="Answer of the clean prompt; several tokens score as a sequence.")
    ] = None
    foil: Annotated[AnswerForm | None, msgspec.Meta(description="Answer of the corrupt prompt.")] = None
    pairs: Annotated[
        list[list[AnswerForm | None]] | None,
        msgspec.Meta(description="Several `[clean, corrupt, answer, foil]`, instead of one; no corrupt prompts with "
                     "`noise` or `ablate`."),
    ] = None  # fmt: skip
    noise: Annotated[
        float | None, msgspec.Meta(description="Gaussian noise on the embeddings of `subject`, in their deviations.")
    ] = None
    subject: Annotated[
        str | list[str | int] | None, msgspec.Meta(description="Text in the clean prompt, or its `[start, stop]`.")
    ] = None
    ablate: Annotated[
        Ablation | None, msgspec.Meta(description="Replace rows of the clean run, without a corrupt run.")
    ] = None
    reference: Annotated[list[TextForm] | None, msgspec.Meta(description="Prompts of `mean` and `resample`.")] = None
    draws: Annotated[int | None, msgspec.Meta(description="Draws of the noise or of resampled prompts.")] = None
    alignment: Annotated[
        list[SpanForm] | None,
        msgspec.Meta(
            description="Pairs of positions (in the prompt of the rows, in the patched prompt), for all `pairs`."
        ),
    ] = None
    seed: Annotated[int, msgspec.Meta(ge=0, description="Seed of the draws and random subspaces.")] = 0
    points: Annotated[str | list[str], msgspec.Meta(description="Hook points; one grid each.")] = "post_block"
    layers: Annotated[
        Literal["all"] | int | list[int | SpanForm],
        msgspec.Meta(description="Rows of the grids: layers and `[start, stop]` pairs."),
    ] = "all"
    positions: Annotated[
        Literal["all"] | int | PositionForm | list[int | SpanForm | PositionForm],
        msgspec.Meta(description="Columns of the grids: positions, `[start, stop]` pairs and texts."),
    ] = "all"
    metric: Annotated[MetricName, msgspec.Meta(description="Metric of the grids.")] = "logit_diff"
    direction: Annotated[
        Literal["denoising", "noising"] | None,
        msgspec.Meta(description="`denoising`: clean rows into the corrupt run; `noising`: corrupt into clean."),
    ] = None
    strength: Annotated[float, msgspec.Meta(description="1 to replace rows, less to interpolate.")] = 1.0
    layer_window: Annotated[int, msgspec.Meta(ge=1, description="Layers patched together.")] = 1
    position_window: Annotated[int, msgspec.Meta(ge=1, description="Positions patched together.")] = 1
    subspace: Annotated[
        Any,
        any_of(MatrixForm, dict[str, dict[str, MatrixForm]], None),
        msgspec.Meta(description="Directions, or by point and layer; only the component in their span is patched."),
    ] = None
    kl_tokens: Annotated[int | None, msgspec.Meta(description="Tokens that `kl` distinguishes.")] = None
    control: Annotated[
        bool, msgspec.Meta(description="Also put the unpatched run's own rows in place, and patch random subspaces.")
    ] = True


STUDY_FIELDS = tuple(name for name in StudyForm.__struct_fields__ if name not in SWEEP_DEFAULTS)
"""Arguments of `PatchingStudy`."""


def read_study(
    body: Mapping[Any, Any], runner: Any, extra: tuple[str, ...] = ()
) -> tuple[PatchingStudy, dict[str, Any]]:
    """Return a study, and the arguments of its sweep.

    Args:
        body: The study as JSON types.
        runner: What the study runs on, as for `PatchingStudy`.
        extra: Further fields, which the caller reads.

    Raises:
        SteeringError: A field is unknown or invalid; its path is the error's field.
    """
    check_fields(body, extra)
    given = {name: value for name, value in body.items() if name not in extra and value is not None}
    study = PatchingStudy(runner, **{name: value for name, value in given.items() if name in STUDY_FIELDS})
    return study, {name: value for name, value in given.items() if name in SWEEP_DEFAULTS}


def check_fields(body: Mapping[Any, Any], extra: tuple[str, ...] = ()) -> None:
    """Raise SteeringError for an unknown field, or a flag of another type, of a study."""
    known = StudyForm.__struct_fields__
    for name in body:
        if name not in (*known, *extra):
            hint = closest(str(name), (*known, *extra))
            advice = f"did you mean {hint}?" if hint else f"use {', '.join(known)}"
            raise SteeringError(shown(name).strip("'"), f"unknown field; {advice}")
    if not isinstance(body.get("control"), (bool, type(None))):
        raise SteeringError("control", f"must be true or false, not {shown(body['control'])}")
