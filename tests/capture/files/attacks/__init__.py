# SPDX-License-Identifier: Apache-2.0
"""What clients, other users of the folder and failing disks can try against the filesystem consumer."""
