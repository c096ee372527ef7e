# SPDX-License-Identifier: Apache-2.0
"""The work list of a vLLM release: what changed of vLLM that this package depends on."""
