# SPDX-License-Identifier: Apache-2.0
"""Steering over HTTP: flags of ``vllm serve``, fields of OpenAI bodies, and the refusals on the way."""
