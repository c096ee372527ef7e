# SPDX-License-Identifier: Apache-2.0
"""The studio: a page in the browser for steering and readouts, which uses nothing but the public HTTP API."""
