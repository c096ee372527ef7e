# SPDX-License-Identifier: Apache-2.0
"""Vector files of other tools: containers, formats and the hook points that their numbers mean."""

from vllm_steer.vectors.read import Choice, VectorFile, read_vectors

__all__ = ["Choice", "VectorFile", "read_vectors"]
