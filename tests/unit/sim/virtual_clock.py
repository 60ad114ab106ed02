"""An engine's time without real time."""

import asyncio


class VirtualClock:
    """Sleeping moves the time on at once, ``sleeps_allowed`` times (None: always); after that time stands still."""

    def __init__(self, sleeps_allowed: int | None = None) -> None:
        self.now = 0.0
        self.sleeps = 0
        self._sleeps_allowed = sleeps_allowed

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if self.sleeps == self._sleeps_allowed:
            await asyncio.Event().wait()
        self.sleeps += 1
        self.now += seconds
        await asyncio.sleep(0)
