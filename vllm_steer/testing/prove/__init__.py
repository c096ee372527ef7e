# SPDX-License-Identifier: Apache-2.0
"""The proof of one model's hook points on the spot: its own configuration shrunk, random weights, both libraries."""
