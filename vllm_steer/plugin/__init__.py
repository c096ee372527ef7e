# SPDX-License-Identifier: Apache-2.0
"""vLLM's plug-in: the entry point, and the functions of this package that run around vLLM's front end."""
