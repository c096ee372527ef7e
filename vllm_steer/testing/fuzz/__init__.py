# SPDX-License-Identifier: Apache-2.0
"""The oracle: random workloads through an engine under pressure and through the simplest possible one.

``vllm-steer fuzz`` runs it. What counts as right is the same request alone, in an eager engine that caches nothing and
computes each prompt in one step; for requests that ask for nothing, in an engine without steering.
"""
