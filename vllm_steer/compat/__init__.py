# SPDX-License-Identifier: Apache-2.0
"""Connections to vLLM: the methods that are wrapped or overridden, by stage, and the supported versions."""
