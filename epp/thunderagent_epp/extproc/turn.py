"""What the server asks of whoever places requests, and what it is told: the seam between protocol and decisions.

The server knows a `Picker`: the director that admits, holds and places by program, or the conformance picker that
does as a test says. Either answers each request with a `Turn`, now or after a hold, and is told through it what
becomes of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from thunderagent_epp.extproc.actions import Cause
from thunderagent_epp.extproc.subset import Subset
from thunderagent_epp.requests.answer import AnswerReader
from thunderagent_epp.requests.inference import InferenceRequest
from thunderagent_epp.requests.policy import RequestPolicy

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

AnswerHeaders: TypeAlias = Callable[[ProcessingRequest], Mapping[str, str]]
"""Headers to set on an answer, by lower-case name, given the proxy's message of its response headers."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes: ``endpoint`` is ``ip:port`` or ``[v6]:port``.

    ``set_headers`` are further request headers for the worker, by lower-case name. ``answer_headers`` says what to
    set on the answer; None leaves it as it is.
    """

    endpoint: str
    set_headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)
    answer_headers: AnswerHeaders | None = None


class Turn(Protocol):
    """One request that was let in. Told each thing once and in order, and in the end `ended`, whatever the end is."""

    @property
    def placement(self) -> Placement | None:
        """Where it goes; None while it is held."""

    async def released(self) -> Placement:
        """Wait for the release of a held one. Raises Refused if the hold ends otherwise."""

    def responding(self, served: str | None) -> None:
        """The answer has begun; ``served`` is the endpoint it comes from, None where the proxy does not say."""

    def progress(self, events: int) -> None:
        """``events`` data events of the answer have been seen."""

    def ended(self, completed: bool, reader: AnswerReader | None, cause: Cause) -> None:
        """A 2xx answer was seen to its end, or anything else ended the request."""


class Picker(Protocol):
    """Places requests."""

    @property
    def policy(self) -> RequestPolicy:
        """How requests are to be read."""

    def admit(self, request: InferenceRequest, *, subset: Subset | None, body_bytes: int) -> Turn:
        """Let a request in: placed at once or held. Raises Refused, with nothing changed."""
