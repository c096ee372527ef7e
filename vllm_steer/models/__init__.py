# SPDX-License-Identifier: Apache-2.0
"""Recipes, one per decoder-layer class, that locate the hook points; discovery of the layers; installation of taps."""
