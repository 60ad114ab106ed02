"""A director that does as it is told and remembers what it was told, in one list in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from thunderagent_epp.extproc.actions import Cause
from thunderagent_epp.extproc.errors import Refused
from thunderagent_epp.extproc.subset import Subset
from thunderagent_epp.extproc.turn import Placement
from thunderagent_epp.requests.answer import AnswerReader
from thunderagent_epp.requests.inference import InferenceRequest
from thunderagent_epp.requests.policy import RequestPolicy

PLACEMENT = Placement("10.0.0.1:8000")


@dataclass
class FakeTurn:
    log: list[Any]
    placement: Placement | None
    release: asyncio.Future[Placement] | None
    waiting: asyncio.Event
    pause: Callable[[], Awaitable[None]] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def released(self) -> Placement:
        assert self.release is not None
        self.log.append("waiting")
        self.waiting.set()
        try:
            if self.pause is not None:
                await self.pause()
            return await self.release
        except asyncio.CancelledError:
            self.log.append("wait cancelled")
            raise

    def responding(self, served: str | None) -> None:
        self.log.append(("responding", served))

    def progress(self, events: int) -> None:
        self.log.append(("progress", events))

    def ended(self, completed: bool, reader: AnswerReader | None, cause: Cause) -> None:
        assert not self.over.is_set(), "a turn ends once"
        self.log.append(("ended", completed, str(cause)))
        self.over.set()


class FakeDirector:
    """Releases at once; with ``held`` each request waits, with ``refusal`` each is refused."""

    def __init__(self, *, held: bool = False, refusal: Refused | None = None) -> None:
        self.policy = RequestPolicy()
        self.held = held
        self.refusal = refusal
        self.pause: Callable[[], Awaitable[None]] | None = None
        self.log: list[Any] = []
        self.requests: list[InferenceRequest] = []
        self.subsets: list[Subset | None] = []
        self.waiting = asyncio.Event()
        self.turns: asyncio.Queue[FakeTurn] = asyncio.Queue()

    def admit(self, request: InferenceRequest, *, subset: Subset | None, body_bytes: int) -> FakeTurn:
        self.requests.append(request)
        self.subsets.append(subset)
        if self.refusal is not None:
            raise self.refusal
        self.log.append(("admitted", body_bytes))
        release: asyncio.Future[Placement] | None = None
        if self.held:
            release = asyncio.get_running_loop().create_future()
        turn = FakeTurn(self.log, None if self.held else PLACEMENT, release, self.waiting, self.pause)
        self.turns.put_nowait(turn)
        return turn
