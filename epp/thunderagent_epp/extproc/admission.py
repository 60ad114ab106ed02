"""One request that was let in: what the server tells of it, and what the director keeps of it meanwhile."""

from __future__ import annotations

from typing import Protocol

from thunderagent_epp.extproc.actions import Cause
from thunderagent_epp.extproc.holds import Hold
from thunderagent_epp.extproc.subset import Subset
from thunderagent_epp.extproc.turn import Placement
from thunderagent_epp.requests.answer import AnswerReader
from thunderagent_epp.requests.inference import InferenceRequest
from thunderagent_epp.scheduling.capacity import WorkerRank


class Host(Protocol):
    """Who accounts for it: the director."""

    def responding(self, admission: Admission, served: str | None) -> None:
        """Its answer has begun."""

    def progress(self, admission: Admission, tokens: int) -> None:
        """Its live context is ``tokens`` now."""

    def end(self, admission: Admission, completed: bool, reader: AnswerReader | None, cause: Cause) -> None:
        """It has ended, for the first and only time."""


class Admission:
    """One request the director let in; `placement` is None while it is held.

    The server tells it each thing once and in order: `responding`, `progress`, and in the end `ended`, whatever the
    end is. A held admission may be ended at any moment: its program is then as it was before.
    """

    __slots__ = (
        "_ended",
        "_host",
        "body_bytes",
        "hold",
        "id",
        "input_tokens",
        "placement",
        "request",
        "subset",
        "tracked",
        "worker",
    )

    def __init__(
        self, host: Host, request_id: str, request: InferenceRequest, subset: Subset | None, body_bytes: int
    ) -> None:
        self._host = host
        self._ended = False
        self.hold: Hold[Admission] | None = None
        self.body_bytes = body_bytes
        self.id = request_id
        self.input_tokens = 0
        self.placement: Placement | None = None
        self.request = request
        self.subset = subset
        self.tracked = False
        """Whether the classifier knows it."""
        self.worker: WorkerRank | None = None

    async def released(self) -> Placement:
        """Wait for the release. Raises Refused if the hold ends otherwise; cancelling it leaves `ended` to be told."""
        assert self.hold is not None, "only a held request is waited for"
        return await self.hold.ended()

    def responding(self, served: str | None) -> None:
        """The answer has begun; ``served`` is the endpoint it comes from, None where the proxy does not say."""
        self._host.responding(self, served)

    def progress(self, events: int) -> None:
        """``events`` data events of the answer have been seen."""
        self._host.progress(self, self.input_tokens + events)

    def ended(self, completed: bool, reader: AnswerReader | None, cause: Cause) -> None:
        """The one terminal hook: a 2xx answer was seen to its end, or anything else ended the request."""
        assert not self._ended, "a request ends once"
        self._ended = True
        self._host.end(self, completed, reader, cause)
