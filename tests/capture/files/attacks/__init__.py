# SPDX-License-Identifier: Apache-2.0
"""Attacks and faults of clients, other users of the folder, and disks against the filesystem consumer."""
