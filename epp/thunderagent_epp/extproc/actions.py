"""What an exchange asks of the server: small frozen values, compared as such in tests.

`Exchange.receive`, `route`, `refuse` and `close` return them; the server carries them out in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from thunderagent_epp.extproc.errors import Refusal
from thunderagent_epp.extproc.subset import Subset
from thunderagent_epp.requests.answer import AnswerReader
from thunderagent_epp.requests.headers import Headers


class Cause(StrEnum):
    """What ended an exchange."""

    ANSWERED = "answered"
    """A 2xx answer was seen to its end; the only cause of a completed turn."""
    UPSTREAM_STATUS = "upstream_status"
    """An answer with another status was seen to its end."""
    LOCAL_REPLY = "local_reply"
    """The proxy answered by itself while the request was still being decided, as when a route's timeout ran out."""
    REFUSED = "refused"
    """The picker refused the request."""
    CLOSED = "closed"
    """The proxy closed its side before the answer had ended: the client left."""
    RESET = "reset"
    """The proxy reset the stream."""
    DRAIN = "drain"
    """The picker shut down before the answer had ended."""
    FAILED = "failed"
    """The picker itself failed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Send this to the proxy now."""

    response: ProcessingResponse


@dataclass(frozen=True, slots=True)
class Decide:
    """The request is whole: classify and select, then call `Exchange.route` or `Exchange.refuse`.

    ``body`` is empty where the proxy does not show it; ``subset`` is None where every worker may be chosen.
    """

    headers: Headers
    body: bytes
    subset: Subset | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Send this refusal of a request for ``path`` (no query); nothing else is sent on this stream."""

    code: Refusal
    path: str
    response: ProcessingResponse


@dataclass(frozen=True, slots=True)
class Responding:
    """The response headers came: prefill is over.

    ``ok``: the status is 2xx. ``served`` is the endpoint that really served, None where the proxy does not say.
    """

    ok: bool
    served: str | None


@dataclass(frozen=True, slots=True)
class Progress:
    """The answer streams on; ``events`` counts its data events so far."""

    events: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The exchange is over; said exactly once after a `Decide`.

    ``reader`` holds what was read of the answer, None where nothing of its body was seen.
    """

    completed: bool
    reader: AnswerReader | None
    cause: Cause


Action: TypeAlias = Answer | Decide | Refuse | Responding | Progress | Ended
