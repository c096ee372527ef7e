# SPDX-License-Identifier: Apache-2.0
"""Patching studies on a server's own engine."""
