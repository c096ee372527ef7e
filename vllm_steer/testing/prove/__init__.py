# SPDX-License-Identifier: Apache-2.0
"""Prove the hook points of one model: its configuration shrunk, random weights, in vLLM and in HF Transformers."""
