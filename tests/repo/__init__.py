# SPDX-License-Identifier: Apache-2.0
"""Checks of the repository itself: files, pins, set-up."""
