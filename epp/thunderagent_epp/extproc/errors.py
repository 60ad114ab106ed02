"""The one table from a refusal to the HTTP answer a client gets.

Whoever refuses a request raises `Refused` with a code; the exchange turns it into the answer that leaves the
proxy. Nobody else in the project names an HTTP status or spells an error body, so that a client, a dashboard and
the documentation always see the same ones (extproc.md, *Refusals*).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import msgspec

ANTHROPIC_PATH: Final = "/v1/messages"
"""Clients of this path, and of those below it, read errors in Anthropic's form; all others in OpenAI's."""

REFUSAL_HEADER: Final = "x-thunderagent-refusal"


class Refusal(StrEnum):
    """Why a request was refused; the value is the code a client sees."""

    INVALID_REQUEST = "invalid_request"
    BODY_TOO_LARGE = "body_too_large"
    REQUEST_LIMIT = "request_limit"
    PROGRAM_LIMIT = "program_limit"
    HOLD_LIMIT = "hold_limit"
    HOLD_TIMEOUT = "hold_timeout"
    NO_ENDPOINTS = "no_endpoints"
    NO_SNAPSHOT = "no_snapshot"
    DRAINING = "draining"


class Refused(Exception):  # noqa: N818 - it is an outcome, not an error of ours
    """A request is refused, and nothing of it stays behind.

    ``message`` is one sentence for the client, None for the code's own. ``retry_after_seconds`` (> 0) overrides
    the table's: a hold that timed out says the scheduler interval.
    """

    def __init__(self, code: Refusal, message: str | None = None, retry_after_seconds: float | None = None) -> None:
        self.code: Final = code
        self.message: Final = message or _TABLE[code].message
        self.retry_after_seconds: Final = retry_after_seconds
        super().__init__(f"{code}: {self.message}")


@dataclass(frozen=True, slots=True)
class RefusalAnswer:
    """The HTTP answer to a refused request: status, headers in lower case, JSON body in UTF-8."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Row:
    """``retry_after_seconds`` None: trying the same again does not help."""

    status: int
    openai_type: str
    anthropic_type: str
    retry_after_seconds: float | None
    message: str


_TABLE: Final[Mapping[Refusal, _Row]] = MappingProxyType(
    {
        Refusal.INVALID_REQUEST: _Row(
            400, "invalid_request_error", "invalid_request_error", None, "The request cannot be read."
        ),
        Refusal.BODY_TOO_LARGE: _Row(
            413,
            "invalid_request_error",
            "request_too_large",
            None,
            "The request body is larger than this gateway accepts.",
        ),
        Refusal.REQUEST_LIMIT: _Row(
            429, "rate_limit_error", "rate_limit_error", 1, "Too many requests are in flight; try again shortly."
        ),
        Refusal.PROGRAM_LIMIT: _Row(
            429,
            "rate_limit_error",
            "rate_limit_error",
            1,
            "Too many sessions are at work and none is idle; try again shortly.",
        ),
        Refusal.HOLD_LIMIT: _Row(
            429,
            "rate_limit_error",
            "rate_limit_error",
            1,
            "Too many request bytes are waiting for a worker; try again shortly.",
        ),
        Refusal.HOLD_TIMEOUT: _Row(
            429,
            "rate_limit_error",
            "rate_limit_error",
            1,
            "No worker had room for this session in time; its turn was not started and may be sent again.",
        ),
        Refusal.NO_ENDPOINTS: _Row(
            503, "server_error", "overloaded_error", 1, "No live worker can take this request; try again shortly."
        ),
        Refusal.NO_SNAPSHOT: _Row(
            503,
            "server_error",
            "overloaded_error",
            1,
            "The endpoint picker has not yet learned of any worker; try again shortly.",
        ),
        Refusal.DRAINING: _Row(
            503, "server_error", "overloaded_error", 1, "The endpoint picker is shutting down; try again."
        ),
    }
)


def refusal_answer(refused: Refused, path: str) -> RefusalAnswer:
    """Build the answer to a refused request for ``path`` (a query is ignored), in the form its clients read."""
    row = _TABLE[refused.code]
    content: dict[str, object]
    if _is_anthropic(path):
        content = {"type": "error", "error": {"type": row.anthropic_type, "message": refused.message}}
    else:
        content = {
            "error": {
                "message": refused.message,
                "type": row.openai_type,
                "code": refused.code.value,
                "param": None,
            }
        }
    headers = {"content-type": "application/json", REFUSAL_HEADER: refused.code.value}
    retry_after = row.retry_after_seconds if refused.retry_after_seconds is None else refused.retry_after_seconds
    if retry_after is not None:
        # The header takes whole seconds, and 0 would invite a client to hammer.
        headers["retry-after"] = str(max(1, math.ceil(retry_after)))
    return RefusalAnswer(status=row.status, headers=headers, body=msgspec.json.encode(content))


def _is_anthropic(path: str) -> bool:
    plain = path.partition("?")[0]
    return plain == ANTHROPIC_PATH or plain.startswith(ANTHROPIC_PATH + "/")
