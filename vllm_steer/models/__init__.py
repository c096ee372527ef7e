# SPDX-License-Identifier: Apache-2.0
"""Where the hook points are in each model."""
