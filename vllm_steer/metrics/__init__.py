# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics: definitions, collectors, and statistics on their way from workers to the front end."""
