"""What a client is told when something is wrong: one shape, one status for each error of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

import msgspec

from millstream.errors import (
    ConnectionNotFound,
    DataDamaged,
    Forbidden,
    GroupNotEmpty,
    GroupNotFound,
    InvalidArgument,
    KeyNotFound,
    MemberFenced,
    MessageNotFound,
    MethodNotAllowed,
    MillstreamError,
    NamespaceNotEmpty,
    NamespaceNotFound,
    OffsetOutOfRange,
    PartitionNotFound,
    PathNotFound,
    PayloadTooLarge,
    PipelineNotFound,
    QueueFull,
    QuotaExceeded,
    ReceiptInvalid,
    ReplayNotFound,
    RequestError,
    RequestTimeout,
    ScheduleFired,
    ScheduleNotFound,
    SessionNotFound,
    StageLost,
    StaleGeneration,
    SubscriptionNotFound,
    Throttled,
    TopicExists,
    TopicNotFound,
    Unauthorized,
    UnavailableError,
    UnknownMember,
    UnsupportedMediaType,
    WebhookNotFound,
)

__all__ = ["Problem", "describe", "status_of"]


_STATUS: Final[Mapping[type[MillstreamError], HTTPStatus]] = {
    PathNotFound: HTTPStatus.NOT_FOUND,
    MethodNotAllowed: HTTPStatus.METHOD_NOT_ALLOWED,
    UnsupportedMediaType: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    TopicNotFound: HTTPStatus.NOT_FOUND,
    PartitionNotFound: HTTPStatus.NOT_FOUND,
    GroupNotFound: HTTPStatus.NOT_FOUND,
    NamespaceNotFound: HTTPStatus.NOT_FOUND,
    MessageNotFound: HTTPStatus.NOT_FOUND,
    ScheduleNotFound: HTTPStatus.NOT_FOUND,
    ReplayNotFound: HTTPStatus.NOT_FOUND,
    WebhookNotFound: HTTPStatus.NOT_FOUND,
    SessionNotFound: HTTPStatus.NOT_FOUND,
    PipelineNotFound: HTTPStatus.NOT_FOUND,
    ConnectionNotFound: HTTPStatus.NOT_FOUND,
    StageLost: HTTPStatus.CONFLICT,
    SubscriptionNotFound: HTTPStatus.NOT_FOUND,
    UnknownMember: HTTPStatus.NOT_FOUND,
    TopicExists: HTTPStatus.CONFLICT,
    GroupNotEmpty: HTTPStatus.CONFLICT,
    NamespaceNotEmpty: HTTPStatus.CONFLICT,
    ReceiptInvalid: HTTPStatus.CONFLICT,
    ScheduleFired: HTTPStatus.CONFLICT,
    StaleGeneration: HTTPStatus.CONFLICT,
    MemberFenced: HTTPStatus.CONFLICT,
    OffsetOutOfRange: HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
    PayloadTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Unauthorized: HTTPStatus.UNAUTHORIZED,
    Forbidden: HTTPStatus.FORBIDDEN,
    KeyNotFound: HTTPStatus.NOT_FOUND,
    QuotaExceeded: HTTPStatus.TOO_MANY_REQUESTS,
    Throttled: HTTPStatus.TOO_MANY_REQUESTS,
    QueueFull: HTTPStatus.TOO_MANY_REQUESTS,
    RequestTimeout: HTTPStatus.GATEWAY_TIMEOUT,
    DataDamaged: HTTPStatus.UNPROCESSABLE_ENTITY,
    InvalidArgument: HTTPStatus.BAD_REQUEST,
}


class Problem(msgspec.Struct, kw_only=True):
    """The body of every answer that is not a success."""

    code: str
    message: str
    details: dict[str, Any] = {}
    suggestions: list[str] = []
    request_id: str
    timestamp: str


def status_of(error: MillstreamError) -> HTTPStatus:
    for kind in type(error).__mro__:
        if kind in _STATUS:
            return _STATUS[kind]
    if isinstance(error, UnavailableError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.BAD_REQUEST if isinstance(error, RequestError) else HTTPStatus.INTERNAL_SERVER_ERROR


def describe(error: MillstreamError, request_id: str) -> Problem:
    return Problem(
        code=error.code,
        message=str(error) or error.code,
        details={"number": error.number, "retriable": error.retriable, **getattr(error, "details", {})},
        suggestions=[error.remedy],
        request_id=request_id,
        timestamp=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    )
