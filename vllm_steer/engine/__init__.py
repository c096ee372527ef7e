# SPDX-License-Identifier: Apache-2.0
"""Joining steering to vLLM's engine: worker, runners, scheduler, cache keys."""
