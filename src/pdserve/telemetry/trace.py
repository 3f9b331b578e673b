"""Spans of traced requests, kept by each process until somebody asks for them."""

from collections import OrderedDict

import msgspec

from pdserve.ids import RequestId

TRACE_HEADER = "X-Pdserve-Trace"
"""HTTP header of a request: `1` has the workers record its layers and pushes."""

MAX_TRACED_REQUESTS = 64
MAX_SPANS = 65_536
"""Of one request: 700 tokens in 3 chunks of 30 layers are 180 spans; the bound is for traced requests of any length."""


class Span(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that took from `start_ns` to `end_ns` (`CLOCK_MONOTONIC`); a span without length is an instant."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    num_tokens: int = 0
    num_bytes: int = 0


class TraceBook:
    """The newest `MAX_TRACED_REQUESTS` traced requests; older ones are forgotten."""

    def __init__(self) -> None:
        self._spans: OrderedDict[RequestId, list[Span]] = OrderedDict()

    def add(self, request_id: RequestId, span: Span) -> None:
        spans = self._spans.setdefault(request_id, [])
        if len(spans) < MAX_SPANS:
            spans.append(span)
        if len(self._spans) > MAX_TRACED_REQUESTS:
            self._spans.popitem(last=False)

    def get(self, request_id: RequestId) -> tuple[Span, ...]:
        """Empty for a request that was not traced here, or was forgotten."""
        return tuple(self._spans.get(request_id, ()))
