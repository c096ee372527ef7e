# SPDX-License-Identifier: Apache-2.0
"""Checks that what the documents show is true."""
