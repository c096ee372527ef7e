# SPDX-License-Identifier: Apache-2.0
"""Metrics, from the engine's process to the dashboard."""
