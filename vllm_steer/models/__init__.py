# SPDX-License-Identifier: Apache-2.0
"""Where the hook points are in each model: one recipe per decoder-layer class, and how taps are installed by it."""
