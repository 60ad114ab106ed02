"""Child processes that are surely ended, and that can say why they ended by themselves.

Envoy and every part of the demo run as one of these. Each is in a process group of its own, so that a Ctrl-C in the
terminal reaches the parent alone and the parent ends them all; the group is killed whatever ends the block, and on
Linux the kernel does it should the parent be killed outright. What a child logs is kept, newest last, for the message
about what went wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import msgspec

_PR_SET_PDEATHSIG: Final = 1
_LOG_LINES_KEPT: Final = 40
_LOG_LINES_SHOWN: Final = 8
_LINE_CHARACTERS_SHOWN: Final = 240

T = TypeVar("T")


class PartError(Exception):
    """A part is missing or broken. The text names it, says what it said last and what to do, in one line.

    ``log`` is what it logged before that, for whoever wants to read on.
    """

    def __init__(self, message: str, log: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.log = log


@dataclass(slots=True, eq=False)
class Child:
    """One child process; ``remedy`` is what to do should it fail, an imperative without a full stop."""

    name: str
    remedy: str
    process: asyncio.subprocess.Process
    log: deque[str] = field(default_factory=lambda: deque(maxlen=_LOG_LINES_KEPT))
    _readers: list[asyncio.Task[None]] = field(default_factory=list)
    _listeners: list[Callable[[str], None]] = field(default_factory=list)

    async def ended(self) -> NoReturn:
        """Wait until it ends by itself, which no part should. Raises PartError."""
        await self.process.wait()
        # All it said, before its last words are quoted.
        await asyncio.wait(self._readers)
        status = self.process.returncode
        if status == -signal.SIGKILL:
            raise PartError(f"{self.name} was killed (SIGKILL) - if nobody did that, this machine is short of memory")
        if status is not None and status < 0:
            raise self.failure(f"was ended by {signal.Signals(-status).name}")
        raise self.failure(f"ended with exit status {status}")

    async def announces(self, read: Callable[[str], T | None], within_seconds: float) -> T:
        """Find the first log line in which ``read`` finds something. Raises PartError when none comes."""
        for line in self.log:
            if (value := read(line)) is not None:
                return value
        found: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def listen(line: str) -> None:
            value = read(line)
            if value is not None and not found.done():
                found.set_result(value)

        async def heard() -> T:
            return await found

        self._listeners.append(listen)
        try:
            async with asyncio.timeout(within_seconds):
                return await first_of(heard(), self.ended())
        except TimeoutError:
            raise self.failure(f"was not ready after {within_seconds:g} s") from None
        finally:
            self._listeners.remove(listen)

    def failure(self, what: str, last_words: str | None = None) -> PartError:
        """The error that says ``what`` happened to this part, quoting its last words."""
        *before, last = [_readable(line) for line in self.log] or ["it said nothing"]
        said = last if last_words is None else last_words
        return PartError(f"{self.name} {what}: {said} - {self.remedy}", tuple(before[-_LOG_LINES_SHOWN:]))

    def kill(self) -> None:
        """End it and what it started; no effect when it has ended."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Kill it and keep all it said."""
        self.kill()
        await self.process.wait()
        await asyncio.wait(self._readers)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # longer than any line worth keeping
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text:
                self.log.append(text)
            for listener in list(self._listeners):
                listener(text)

    def _keep_log(self) -> None:
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                self._readers.append(asyncio.create_task(self._read(stream), name=f"log of {self.name}"))


async def first_of(*coroutines: Coroutine[Any, Any, T]) -> T:
    """Run all until one ends, end the others, and return or raise what that one did; the earlier named goes first."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first = next(task for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return first.result()


@contextlib.asynccontextmanager
async def running_child(
    name: str, *command: str | Path, remedy: str, stdout: int | None = asyncio.subprocess.PIPE
) -> AsyncIterator[Child]:
    """Run ``command`` for the length of the block; its stderr, and its stdout if that is a pipe, are its log.

    Raises PartError when it cannot be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *ended_with_parent(os.getpid()),
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise PartError(f"{name} cannot be started: {error.strerror or error} - {remedy}") from error
    child = Child(name, remedy, process)
    child._keep_log()
    try:
        yield child
    finally:
        await child.stop()


def _readable(line: str) -> str:
    """A log line for people: of a JSON one its level, event and keys."""
    try:
        entry = msgspec.json.decode(line)
    except msgspec.DecodeError:
        entry = None
    if isinstance(entry, dict) and "event" in entry:
        keys = (f"{key}={value}" for key, value in entry.items() if key not in ("time", "level", "logger", "event"))
        line = " ".join((f"{entry.get('level', 'info')}: {entry['event']}", *keys))
    return line if len(line) <= _LINE_CHARACTERS_SHOWN else f"{line[:_LINE_CHARACTERS_SHOWN]}..."


def ended_with_parent(parent: int) -> tuple[str, ...]:
    """The start of a command line whose program the kernel kills when ``parent`` dies; empty where it cannot.

    A step between, and not ``preexec_fn``: that would fork a process whose threads are inside gRPC.
    """
    if sys.platform != "linux":
        return ()
    step = (
        "import ctypes, os, signal, sys\n"
        f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)\n"
        # The parent may have died before the kernel was asked.
        f"os.getppid() == {parent} and os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    return (sys.executable, "-I", "-S", "-c", step)
