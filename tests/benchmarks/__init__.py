# SPDX-License-Identifier: Apache-2.0
"""How measurements are read."""
