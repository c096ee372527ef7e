# SPDX-License-Identifier: Apache-2.0
"""JSON form of capture specs."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

import msgspec

from vllm_steer.points import POINT_NAMES
from vllm_steer.request.declared import any_of
from vllm_steer.request.part import GeneratedForm, PromptPartName
from vllm_steer.request.projection import DirectionsForm, ProbesForm
from vllm_steer.request.selector import PositionListForm, PositionsName
from vllm_steer.request.sites import NAMES_LISTED, LayersForm

DtypeName = Literal["float32", "float16", "bfloat16"]
ReduceName = Literal["mean", "last"]
DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)
REDUCTIONS: tuple[ReduceName, ...] = get_args(ReduceName)


class CaptureForm(msgspec.Struct, kw_only=True):
    """Rows that one consumer receives. All other keys are options of the consumer."""

    hooks: Annotated[
        Any,
        any_of(dict[str, LayersForm], list[str]),
        msgspec.Meta(
            description=f"Layers by hook point ({', '.join(POINT_NAMES)}), or a list of names of sites in other "
            f"libraries, such as `blocks.3.hook_resid_post`; {NAMES_LISTED}.",
        ),
    ]
    positions: Annotated[
        PositionsName | PromptPartName | PositionListForm | GeneratedForm,
        msgspec.Meta(
            description="Tokens to capture: a name, the messages of a role, images, a list of positions, or positions "
            "that count from the first generated token."
        ),
    ] = "last_prompt"
    before: Annotated[bool, msgspec.Meta(description="Capture before the edits of the same point apply.")] = False
    dtype: Annotated[
        DtypeName | None, msgspec.Meta(description="Type that rows are converted to; null for the model's own.")
    ] = None
    reduce: Annotated[
        Any,
        any_of(ReduceName | None, DirectionsForm, ProbesForm),
        msgspec.Meta(
            description="`mean` or `last` of the rows of a site, or projections of each row on directions: "
            "`{directions: [[...]]}` or, for probes of registered modules, `{probes: [module/probe]}`."
        ),
    ] = None


SPEC_KEYS: tuple[str, ...] = CaptureForm.__struct_fields__

DTYPE_ALIASES: Mapping[str, DtypeName] = MappingProxyType(
    {f"torch.{name}": name for name in DTYPES}
    | dict.fromkeys(("fp32", "float", "single"), "float32")
    | dict.fromkeys(("fp16", "half"), "float16")
    | {"bf16": "bfloat16"}
)
"""Dtypes by other names, for error messages."""
ARGUMENT_ALIASES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("hook", "layer", "layers", "point", "points", "sites"), "hooks")
    | dict.fromkeys(("position", "tokens", "token_positions"), "positions")
    | {"reduction": "reduce", "pooling": "reduce"}
)
"""Fields of a capture spec by names that other interfaces use, for error messages."""
