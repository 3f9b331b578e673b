"""What a client is told when its request fails: the one table from errors to HTTP status and OpenAI error body."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import assert_never

from aiohttp import web

from pdserve import errors
from pdserve.gateway.failures import INVALID_REQUEST, OVERLOADED, SERVER_ERROR, Failure
from pdserve.wire.cluster import Failed, FailureKind

MAX_RETRY_AFTER_S = 3600.0
"""What a worker asks for beyond this, NaN and infinity too, is told to clients as one hour."""


@dataclass(frozen=True, slots=True)
class Row:
    status: int
    type: str
    code: str


TABLE: Mapping[type[errors.PdserveError], Row] = MappingProxyType(
    {
        errors.InvalidField: Row(400, INVALID_REQUEST, "invalid_value"),
        errors.UnsupportedField: Row(400, INVALID_REQUEST, "unsupported_parameter"),
        errors.ContextOverflow: Row(400, INVALID_REQUEST, "context_length_exceeded"),
        errors.ModelNotFound: Row(404, INVALID_REQUEST, "model_not_found"),
        errors.AuthenticationError: Row(401, INVALID_REQUEST, "invalid_api_key"),
        errors.CapacityError: Row(429, OVERLOADED, "over_capacity"),
        errors.PeerLost: Row(503, SERVER_ERROR, "worker_lost"),
        errors.HandoffCancelled: Row(503, SERVER_ERROR, "handoff_cancelled"),
        errors.HandoffTimeout: Row(504, SERVER_ERROR, "timeout"),
        errors.LayoutMismatch: Row(500, SERVER_ERROR, "layout_mismatch"),
        errors.FabricError: Row(500, SERVER_ERROR, "fabric_error"),
        errors.LocalProtocolError: Row(500, SERVER_ERROR, "protocol_error"),
        errors.RemoteProtocolError: Row(502, SERVER_ERROR, "protocol_error"),
        errors.ConfigError: Row(500, SERVER_ERROR, "config_error"),
        errors.InternalError: Row(500, SERVER_ERROR, "internal_error"),
    }
)
"""One row for each leaf of `pdserve.errors`; `tests/policy/test_error_mapping.py` holds it complete."""


def failure_of(error: errors.PdserveError) -> Failure:
    row = TABLE[type(error)]
    return Failure(
        status=row.status,
        type=row.type,
        code=row.code,
        message=error.message,
        param=error.param if isinstance(error, errors.RequestError) else None,
        retry_after_s=error.retry_after_s if isinstance(error, errors.CapacityError) else None,
    )


def failure_of_worker(failed: Failed) -> Failure:
    """What a worker's `Failed` means to the client."""
    match failed.kind:
        case FailureKind.CAPACITY:
            row = Row(429, OVERLOADED, "over_capacity")
        case FailureKind.TIMEOUT:
            row = Row(504, SERVER_ERROR, "timeout")
        case FailureKind.INVALID:
            row = Row(400, INVALID_REQUEST, "invalid_value")
        case FailureKind.INTERNAL:
            row = Row(500, SERVER_ERROR, "internal_error")
        case FailureKind.SHUTTING_DOWN:
            row = Row(503, SERVER_ERROR, "shutting_down")
        case _:
            assert_never(failed.kind)
    retry_after_s = 1.0 if failed.retry_after_s is None else failed.retry_after_s
    if not math.isfinite(retry_after_s):
        retry_after_s = MAX_RETRY_AFTER_S
    return Failure(
        status=row.status,
        type=row.type,
        code=row.code,
        message=failed.message,
        retry_after_s=min(retry_after_s, MAX_RETRY_AFTER_S) if row.status in (429, 503) else None,
    )


def failure_of_http(error: web.HTTPException) -> Failure:
    """What aiohttp itself refuses: unknown paths, wrong methods, bodies over the limit."""
    codes = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "request_too_large"}
    return Failure(
        status=error.status,
        type=INVALID_REQUEST if error.status < 500 else SERVER_ERROR,
        code=codes.get(error.status, "http_error"),
        message=error.text or error.reason,
    )
