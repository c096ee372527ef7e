# SPDX-License-Identifier: Apache-2.0
"""Interfaces of other libraries on this engine, over the public API only; each module is imported on demand."""
