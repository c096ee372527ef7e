# SPDX-License-Identifier: Apache-2.0
"""Differential fuzzer: run random workloads on a loaded engine and compare each request with the same request alone.

The reference is an eager engine without prefix cache that runs one request at a time and each prompt in one step. Plain
requests are compared with stock vLLM. ``vllm-steer fuzz`` runs the fuzzer; ``docs/design/oracle.md`` describes it.
"""
