# SPDX-License-Identifier: Apache-2.0
"""From texts to a direction in the residual stream."""

from vllm_steer.lab.directions import Direction, Directions
from vllm_steer.lab.examples import Examples, read_examples
from vllm_steer.lab.methods import make

__all__ = ["Direction", "Directions", "Examples", "make", "read_examples"]
