# SPDX-License-Identifier: Apache-2.0
"""Capture: rows of the residual stream, from the engine's steps to consumers, files and results."""

from vllm_steer.capture.results import CapturedRequest, CaptureResult, CaptureResults, Site, SiteRows, Status

__all__ = ["CaptureResult", "CaptureResults", "CapturedRequest", "Site", "SiteRows", "Status"]
