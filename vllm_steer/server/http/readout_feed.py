# SPDX-License-Identifier: Apache-2.0
"""Readouts and trace of one choice of a response, as JSON.

The values are read when a part of the response is sent, and not when the engine's output is processed, so an event that
covers several tokens costs as much as an event of one token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_steer.frontend.sample_state import sample_of

READOUTS_KEY, TRACE_KEY = "readouts", "steering_trace"
"""Names of the response fields."""
_encoder = msgspec.json.Encoder()


class ReadoutFeed:
    """Readouts of one sample that the response has not carried yet. For the event loop only."""

    def __init__(self, state: Any, no_trace: str | None = None) -> None:
        """Take over the readouts of a sample; its outputs no longer carry them.

        Args:
            state: vLLM's ``RequestState`` of a sample whose program has records.
            no_trace: Error in place of the trace, if the choice has none.
        """
        sample = sample_of(state)
        if sample is None or sample.capture is None or sample.capture.readouts is None:
            raise ValueError("the request has no records")
        sample.read_elsewhere = True
        self._state, self._sample, self._no_trace = state, sample, no_trace
        capture, self._stream = sample.capture, sample.capture.readouts
        self._receiver = capture.receiver
        self._drop = not (capture.specs or capture.controlled or self._stream.has_trace)
        self._trace_taken = self._has_output = False

    def _awaits_prompt(self) -> bool:
        """Return whether the engine may not have sent all records of the prompt, which is certain only with an output.

        An event can come before: a stream of chat completions begins all choices when the first one has an output.
        """
        self._has_output = self._sample.has_stopped or self._state.detokenizer.num_output_tokens() > 0
        return not self._has_output

    def take_fields(self, *, last: bool) -> tuple[bytes, bytes]:
        """Return the JSON of the new values, and of the trace if the choice has ended; each may be empty."""
        values = b""
        if self._has_output or last or not self._awaits_prompt():
            forwarded = self._sample.num_forwarded(self._state)
            values = self._stream.next_json(self._receiver, self._state.request_id, forwarded, drop=self._drop)
        if not last:
            return values, b""
        trace = self.take_trace()
        self._receiver.forget(self._state.request_id)
        return values, b"" if trace is None else _encoder.encode(trace)

    def take_members(self, *, last: bool) -> list[bytes]:
        """Return the fields of `take_fields` as members of a JSON object."""
        fields = zip((READOUTS_KEY, TRACE_KEY), self.take_fields(last=last), strict=True)
        return [b'"%b":%b' % (name.encode(), value) for name, value in fields if value]

    def take_all(self) -> dict[str, Any]:
        """Return the new values of every readout of the request as JSON types, in its order."""
        self._receiver.flush(self._state.request_id)
        return self._stream.to_json(self._stream.next_delta(self._sample.num_forwarded(self._state), drop=self._drop))

    def take_trace(self) -> dict[str, Any] | None:
        """Return the trace as JSON types, or the error, once; None without gated and live edits."""
        if self._trace_taken or not self._stream.has_trace:
            return None
        self._trace_taken = True
        if self._no_trace is not None:
            return {"error": self._no_trace}
        trace = self._sample.final_trace(self._state)
        return None if trace is None else trace.to_json()
