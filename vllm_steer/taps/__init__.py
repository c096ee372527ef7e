# SPDX-License-Identifier: Apache-2.0
"""What runs at a hook point: the tap, its tables, its definition in plain torch, and its kernel."""
