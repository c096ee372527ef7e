# SPDX-License-Identifier: Apache-2.0
"""Capture files: layouts, format, writers and reader."""
