# SPDX-License-Identifier: Apache-2.0
"""Capture: rows out of the forward pass, and where they go."""

from vllm_steer.capture.results import CapturedRequest, CaptureResult, Site, SiteRows, Status

__all__ = ["CaptureResult", "CapturedRequest", "Site", "SiteRows", "Status"]
