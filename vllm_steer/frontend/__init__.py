# SPDX-License-Identifier: Apache-2.0
"""What happens to a request before and after the engine, in the process of ``LLM`` or the server."""
