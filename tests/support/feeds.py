"""Both ends of the capacity feed for tests: a picker's feed under way, and an operator that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from thunderagent_epp.feed import capacity_feed_pb2 as pb
from thunderagent_epp.feed.operator_feed import Backoff, OperatorFeed, Unready
from thunderagent_epp.feed.wire import Counters
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.snapshot import Snapshot

POLICY = "llm/coder"
AT_ONCE = Backoff(first_seconds=0.001, cap_seconds=0.005)


def capacity(*names: str, tokens: int = 1000) -> CapacitySnapshot:
    return CapacitySnapshot(tuple(Worker(WorkerRank(name), "10.0.0.1:8000", tokens) for name in names))


class Follower:
    """A picker's feed under way, and what it did."""

    def __init__(self, target: str, identity: str = "llm/epp-0", **options: Any) -> None:
        self.published: asyncio.Queue[Snapshot] = asyncio.Queue()
        self.unready: asyncio.Queue[Unready | None] = asyncio.Queue()
        self.counters = Counters()
        self.problem: Exception | None = None
        """Raised where a snapshot is published."""
        self.feed = OperatorFeed(
            target,
            POLICY,
            identity,
            self._publish,
            counters=lambda: self.counters,
            unready=self.unready.put_nowait,
            **{"backoff": AT_ONCE, "report_seconds": 0.001} | options,
        )

    def _publish(self, snapshot: Snapshot) -> None:
        if self.problem is not None:
            raise self.problem
        self.published.put_nowait(snapshot)


@asynccontextmanager
async def following(target: str, identity: str = "llm/epp-0", **options: Any) -> AsyncIterator[Follower]:
    follower = Follower(target, identity, **options)
    running = asyncio.create_task(follower.feed.run())
    try:
        yield follower
    finally:
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()


class ScriptedStream:
    """One picker's stream as the operator sees it."""

    def __init__(self, context: grpc.aio.ServicerContext[pb.FollowRequest, Any]) -> None:
        self._context = context
        self._end: asyncio.Future[grpc.StatusCode] = asyncio.get_running_loop().create_future()
        self.opened: asyncio.Queue[pb.Open] = asyncio.Queue()
        self.acknowledged: asyncio.Queue[pb.Acknowledgement] = asyncio.Queue()
        self.counted: asyncio.Queue[pb.Counters] = asyncio.Queue()
        self.gone = asyncio.Event()

    async def run(self) -> None:
        hearing = asyncio.create_task(self._hear())
        try:
            code = await self._end
            if code is not grpc.StatusCode.OK:
                await self._context.abort(code, "as the test wants it")
        finally:
            hearing.cancel()
            self.gone.set()

    async def _hear(self) -> None:
        while isinstance(request := await self._context.read(), pb.FollowRequest):
            match request.WhichOneof("message"):
                case "open":
                    self.opened.put_nowait(request.open)
                case "acknowledgement":
                    self.acknowledged.put_nowait(request.acknowledgement)
                case "counters":
                    self.counted.put_nowait(request.counters)

    async def send(self, message: pb.Snapshot | pb.NoSnapshot | bytes) -> None:
        match message:
            case pb.Snapshot():
                await self._context.write(pb.FollowResponse(snapshot=message).SerializeToString())
            case pb.NoSnapshot():
                await self._context.write(pb.FollowResponse(no_snapshot=message).SerializeToString())
            case _:
                await self._context.write(message)

    def end(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self._end.set_result(code)


class ScriptedOperator:
    """Takes streams and leaves the rest to the test."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[ScriptedStream] = asyncio.Queue()
        self.target = ""

    async def next(self) -> ScriptedStream:
        return await self.streams.get()

    async def _follow(self, _: object, context: grpc.aio.ServicerContext[pb.FollowRequest, Any]) -> None:
        stream = ScriptedStream(context)
        self.streams.put_nowait(stream)
        await stream.run()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedOperator]:
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            self._follow,  # type: ignore[arg-type]
            request_deserializer=pb.FollowRequest.FromString,
            response_serializer=None,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("thunderagent.feed.v1.CapacityFeed", {"Follow": handler}),)
        )
        self.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self
        finally:
            await server.stop(None)


class Recorded:
    """What a module logs, and a way to wait for it."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._more = asyncio.Event()

    def __getattr__(self, level: str) -> Callable[..., None]:
        def say(event: str, **keys: object) -> None:
            self.events.append({"level": level, "event": event, **keys})
            self._more.set()

        return say

    def of(self, level: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["level"] == level]

    async def until(self, level: str, count: int) -> None:
        while len(self.of(level)) < count:
            self._more.clear()
            await self._more.wait()


def recorded(monkeypatch: pytest.MonkeyPatch, module: str) -> Recorded:
    log = Recorded()
    monkeypatch.setattr(f"{module}.log", log)
    return log
