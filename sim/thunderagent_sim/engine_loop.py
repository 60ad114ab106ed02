"""Gives a simulated engine its time, and its answers to the requests that wait for them.

One task advances the engine in fixed steps while there is work and sleeps without a wake-up when there is none.
Handlers use `EngineLoop.generate`: leaving that scope, for whatever reason, takes the sequence out of the engine, so
a client that goes away frees its blocks at once. The clock is a parameter: tests pass one that jumps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from thunderagent_sim.engine import Engine, FinishReason, Sequence, SequenceState


class Clock(Protocol):
    """What the loop needs of time, in seconds."""

    def time(self) -> float:
        """Return the time now; it never goes backwards."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


class LoopClock:
    """The running event loop's own clock."""

    def time(self) -> float:
        """Return the event loop's time."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Wait in real time."""
        await asyncio.sleep(seconds)


class Generation:
    """One answer in the making, as its handler sees it."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._progress = asyncio.Event()
        self._sent_bytes = 0

    async def finished(self) -> None:
        """Wait for the last token."""
        while self.sequence.state is not SequenceState.FINISHED:
            self._progress.clear()
            await self._progress.wait()

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the answer's text as it comes, all new tokens at once, until it is complete."""
        while True:
            answer = self.sequence.answer
            if len(answer) > self._sent_bytes:
                piece, self._sent_bytes = answer[self._sent_bytes :], len(answer)
                yield piece.decode()
            if self.sequence.state is SequenceState.FINISHED:
                return
            self._progress.clear()
            if len(self.sequence.answer) == self._sent_bytes:
                await self._progress.wait()

    def wake(self) -> None:
        """Tell the handler that the sequence has new tokens."""
        self._progress.set()


class EngineLoop:
    """Runs one engine. ``step_seconds`` bounds both the wake-ups per second and the delay of a token.

    ``on_finished`` is called with each sequence that was answered to its end.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        step_seconds: float = 0.02,
        on_finished: Callable[[Sequence], None] | None = None,
    ) -> None:
        self.engine = engine
        self._clock = clock
        self._step_seconds = step_seconds
        self._on_finished = on_finished
        self._work = asyncio.Event()
        self._generations: dict[Sequence, Generation] = {}

    @contextmanager
    def generate(
        self, prompt: bytes, max_tokens: int, finish_reason: FinishReason, *, transferred: bool | None = None
    ) -> Iterator[Generation]:
        """Put a request into the engine for as long as the scope lasts. Raises ValueError as `Engine.submit` does."""
        sequence = self.engine.submit(prompt, max_tokens, finish_reason, self._clock.time(), transferred=transferred)
        generation = self._generations[sequence] = Generation(sequence)
        self._work.set()
        try:
            yield generation
        finally:
            del self._generations[sequence]
            self.engine.abort(sequence, self._clock.time())

    async def run(self) -> None:
        """Advance the engine until cancelled."""
        while True:
            if self.engine.idle:
                self._work.clear()
                await self._work.wait()
            await self._clock.sleep(self._step_seconds)
            for sequence in self.engine.advance(self._clock.time()):
                if sequence.state is SequenceState.FINISHED and self._on_finished is not None:
                    self._on_finished(sequence)
                self._generations[sequence].wake()
