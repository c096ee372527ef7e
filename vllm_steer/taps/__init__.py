# SPDX-License-Identifier: Apache-2.0
"""Taps, the modules at the hook points: device tables, definitions in plain torch, and Triton kernels."""
