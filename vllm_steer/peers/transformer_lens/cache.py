# SPDX-License-Identifier: Apache-2.0
"""Names of hooks, and the rows that a run returns by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vllm_steer import site
from vllm_steer.adapters import find_foreign_site, is_integer, shown
from vllm_steer.errors import SteeringError

HOOKS: Mapping[str, str] = {
    "pre_attn": "resid_pre",
    "attn_out": "attn_out",
    "post_attn": "resid_mid",
    "mlp_out": "mlp_out",
    "post_block": "resid_post",
}
"""Names in TransformerLens by point, in order within a block. ``mlp_in`` has none that means exactly the same."""


def get_act_name(name: str, layer: int) -> str:
    """Return the full name of a hook.

    Raises:
        SteeringError: The hook is not served.

    Examples:
        >>> from vllm_steer.peers.transformer_lens import get_act_name
        >>> get_act_name("resid_post", 3)
        'blocks.3.hook_resid_post'
    """
    spellings = (f"{name}.{layer}", f"blocks.{layer}.attn.hook_{name}", f"blocks.{layer}.mlp.hook_{name}")
    known = next((each for each in spellings if find_foreign_site(each) is not None), spellings[0])
    return hook_name(*site(known))


def hook_name(point: str, layer: int) -> str:
    """Return the name of a site in TransformerLens; raise SteeringError if it has none."""
    if point not in HOOKS:
        raise SteeringError("name", f"{point} has no name in TransformerLens; use one of {', '.join(HOOKS)}")
    return f"blocks.{layer}.hook_{HOOKS[point]}"


class ActivationCache(Mapping[str, torch.Tensor]):
    """Rows by name of the hook, ``[batch, tokens, hidden]``, on the CPU.

    ``cache["blocks.1.hook_resid_post"]``, ``cache["resid_post", 1]`` and other names of the same site are the same
    tensor. Negative layers count from the end.
    """

    def __init__(self, rows: Mapping[str, torch.Tensor], num_layers: int) -> None:
        self._rows = dict(rows)
        self._num_layers = num_layers
        self.has_batch_dim = True
        """Whether rows have a first dimension for the prompts."""

    def __getitem__(self, key: Any) -> torch.Tensor:
        if isinstance(key, tuple):
            name, layer = key[0], key[1]
            if not is_integer(layer) or not -self._num_layers <= layer < self._num_layers:
                raise KeyError(f"{shown(key)}: the model has {self._num_layers} layers")
            key = f"{name}.{layer % self._num_layers}"
        try:
            return self._rows[hook_name(*site(key, num_layers=self._num_layers))]
        except SteeringError as error:
            raise KeyError(str(error)) from None
        except KeyError:
            raise KeyError(f"{key} was not cached; add it to names_filter") from None

    def __contains__(self, key: object) -> bool:
        try:
            self[key]
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def stack_activation(self, name: str, layer: int | None = -1) -> torch.Tensor:
        """Return the rows of all layers, or of those below ``layer``: ``[layers, batch, tokens, hidden]``."""
        count = self._num_layers if layer is None or layer == -1 else layer
        return torch.stack([self[name, number] for number in range(count)])

    def remove_batch_dim(self) -> ActivationCache:
        """Remove the first dimension of the rows of the only prompt, and return this cache; a second call does nothing.

        Raises:
            SteeringError: There are several prompts.
        """
        if self.has_batch_dim:
            if any(len(rows) != 1 for rows in self._rows.values()):
                raise SteeringError("cache", "has several prompts; the batch dimension cannot be removed")
            self._rows = {name: rows[0] for name, rows in self._rows.items()}
            self.has_batch_dim = False
        return self
