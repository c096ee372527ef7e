# SPDX-License-Identifier: Apache-2.0
"""Edits and captures of Gemma 3n's streams in HF Transformers, by the formulas of docs/reference/streams.md.

HF's block passes all streams in one tensor ``[streams, 1, tokens, hidden]`` and predicts, computes and corrects in one
``forward``. The points are on the prediction of the active stream, on what the norm before the MLP reads, and on the
active stream that the block leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from tests.conformance.hf_reference import Intervention, Reference, _after_norm, _edited
from tests.conformance.model import TinyModel


class AltUpReference(Reference):
    """An HF model whose blocks have several streams, one of them active.

    vLLM's class without towers leaves out the embedding of a token in each layer (its ``per_layer_inputs`` are None),
    and so does this reference.
    """

    def __init__(self, tiny: TinyModel, model: PreTrainedModel) -> None:
        super().__init__(tiny, model)
        body: Any = model.get_submodule("model")
        body.get_per_layer_inputs = lambda *args: None

    @contextmanager
    def _hooks(self, edits: Sequence[Intervention], streams: dict[str, torch.Tensor]) -> Iterator[None]:
        active = self.model.config.get_text_config().altup_active_idx

        def changed(tensor: torch.Tensor, point: str, field: str, number: int) -> torch.Tensor:
            here = [edit for edit in edits if edit.layer == number]
            streams[field][number] = _edited(tensor, point, here)
            return streams[field][number].clone()

        with ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                parts: Any = block
                predict = parts.altup.predict

                def predicted(states: Any, number: int = number, predict: Any = predict) -> Any:
                    out = predict(states)
                    out[active, 0] = changed(out[active, 0], "pre_attn", "x_in", number)
                    return out

                def mid(norm: Any, args: Any, number: int = number) -> None:
                    # The block keeps this very tensor for the sum behind the MLP.
                    args[0][0] = changed(args[0][0], "post_attn", "x_mid", number)

                def left(block: Any, args: Any, out: Any, number: int = number) -> Any:
                    out[active, 0] = changed(out[active, 0], "post_block", "x_out", number)
                    return out

                stack.enter_context(patch.object(parts.altup, "predict", predicted))
                norm = parts.pre_feedforward_layernorm
                here = [edit for edit in edits if edit.layer == number]
                for handle in (
                    norm.register_forward_pre_hook(mid),
                    norm.register_forward_hook(_after_norm(number, here, streams)),
                    block.register_forward_hook(left),
                ):
                    stack.callback(handle.remove)
            yield
