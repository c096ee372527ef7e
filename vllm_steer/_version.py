# SPDX-License-Identifier: Apache-2.0
"""The package's version, in the one place where it is written."""

__version__ = "0.1.0"
