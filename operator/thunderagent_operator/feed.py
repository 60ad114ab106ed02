"""The operator's end of the capacity feed: every picker of every policy, told what stands in the `SnapshotBook`.

The reconciler calls in with what it found; a stream per picker tells the newest of it and hears what became of it.
Nothing is queued for anyone: a stream that has caught up waits, one that lags skips to what stands in the book when
it can be written to again, so slow pickers cost no memory. Until it leads, the server refuses every picker as
UNAVAILABLE, which sends them to look for the leader.

Not thread-safe: everything here happens in the event loop that `FeedServer.start` ran in.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from thunderagent_epp.feed import capacity_feed_pb2 as pb
from thunderagent_epp.feed import wire
from thunderagent_epp.feed.capacity_feed_pb2_grpc import CapacityFeedServicer, add_CapacityFeedServicer_to_server
from thunderagent_epp.feed.operator_feed import POLICY_PATTERN
from thunderagent_epp.feed.tls import TlsFiles
from thunderagent_epp.feed.wire import Applied, Counters
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.scheduling.capacity import CapacitySnapshot
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.topology import Disaggregation
from thunderagent_epp.telemetry import logs
from thunderagent_operator.feed_tls import server_credentials
from thunderagent_operator.snapshot_book import ID_MAX, Absent, Published, SnapshotBook

OPEN_SECONDS: Final = 10.0
"""For a picker's first message; one that says nothing holds a stream for nothing."""

KEEPALIVE_SECONDS: Final = 10.0
"""As the pickers': a dead one is gone from the status after 20 seconds."""

STANDBY: Final = "this operator does not lead"
SHUTDOWN: Final = "this operator shuts down"

log = logs.logger("operator")

_Context = grpc.aio.ServicerContext[pb.FollowRequest, pb.FollowResponse]


@dataclass(frozen=True, slots=True)
class Picker:
    """One connected picker, as it last said. ``current``: it has in force what stands in the book.

    ``refusal`` is why it did not apply the snapshot it was last sent.
    """

    identity: str
    version: str
    address: str
    applied: Applied | None
    current: bool
    refusal: str | None
    counters: Counters | None


class FeedServer:
    """Serves one address, ``host:port``; port 0 takes a free one, see ``port``. ``tls`` None is plaintext.

    Starts as a standby: `serve` once this operator leads *and* every policy there is has been published or withheld,
    for a policy that is not in the book is told to be none. ``changed`` is called with a policy's name when its
    pickers have changed or said something new. Raises FeedTlsError when the TLS files cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TlsFiles | None = None,
        changed: Callable[[str], None] = lambda policy: None,
        clock: Callable[[], float] = time.time,
        open_seconds: float = OPEN_SECONDS,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
    ) -> None:
        self._address = address
        self._credentials = None if tls is None else server_credentials(tls)
        self._changed = changed
        self._clock = clock
        self._open_seconds = open_seconds
        self._keepalive_seconds = keepalive_seconds
        self._book = SnapshotBook(clock())
        self._streams: dict[str, dict[_Stream, None]] = {}
        """By policy, in the order they were opened."""
        self._closed: str | None = STANDBY
        """Why pickers are refused; None while they are served."""
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen, as a standby. Raises OSError when the address cannot be had."""
        keepalive_ms = int(self._keepalive_seconds * 1000)
        self._server = grpc.aio.server(
            options=[
                ("grpc.keepalive_time_ms", keepalive_ms),
                ("grpc.keepalive_timeout_ms", keepalive_ms),
                # gRPC 1.85 waits a minute for an answer to a ping, whatever the line above says.
                ("grpc.http2.ping_timeout_ms", keepalive_ms),
                ("grpc.http2.max_pings_without_data", 0),
                # Pickers ask for a sign of life as often as they see fit.
                ("grpc.http2.min_ping_interval_without_data_ms", 0),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.max_receive_message_length", wire.MESSAGE_BYTES_MAX),
                # Two operators on one port would share its pickers by chance.
                ("grpc.so_reuseport", 0),
            ]
        )
        add_CapacityFeedServicer_to_server(_Servicer(self), self._server)  # type: ignore[no-untyped-call]
        try:
            if self._credentials is None:
                self.port = self._server.add_insecure_port(self._address)
            else:
                self.port = self._server.add_secure_port(self._address, self._credentials)
        except RuntimeError as error:
            raise OSError(f"the feed cannot listen on {self._address}: {error}") from None
        await self._server.start()
        log.info("feed listens", address=self._address, port=self.port, tls=self._credentials is not None)

    def serve(self) -> None:
        """Take pickers: this operator leads from now on. Ids are lifted above those of the leader before."""
        if self._closed is not None:
            self._closed = None
            self._book.start_over(self._clock())
            log.info("feed serves")

    def pause(self) -> None:
        """Send every picker away: this operator leads no longer. What is published is kept for when it does."""
        self._close(STANDBY)

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Send every picker away and stop listening; streams that do not end in time are cut."""
        self._close(SHUTDOWN)
        if self._server is not None:
            await self._server.stop(grace_seconds)

    @property
    def serving(self) -> bool:
        """Whether pickers are taken."""
        return self._closed is None

    def publish(
        self,
        policy: str,
        capacity: CapacitySnapshot,
        admission: AdmissionPolicy,
        requests: RequestPolicy,
        disaggregation: Disaggregation | None = None,
    ) -> Published:
        """Put a content in force for ``namespace/name``, tell its pickers if it is new, and return what stands.

        Costs a comparison when nothing changed. Raises ValueError for a number that takes more than 64 bits.
        """
        before = self._book.standing(policy)
        known = (stream.applied.id for stream in self._streams.get(policy, ()) if stream.applied)
        published = self._book.publish(
            policy,
            self._clock(),
            capacity,
            admission,
            requests,
            disaggregation,
            above=max((id for id in known if id <= ID_MAX), default=0),
        )
        if published is not before:
            self._wake(policy)
        return published

    def withhold(self, policy: str, detail: str) -> None:
        """The policy is there but cannot be used as it is; what is in force stays, ``detail`` is for people."""
        self._book.withhold(policy, detail)
        self._wake(policy)

    def delete(self, policy: str) -> None:
        """The policy is gone: its pickers are told, and followed up should it come back."""
        self._book.delete(policy)
        self._wake(policy)

    def standing(self, policy: str) -> Published | Absent:
        """What the policy's pickers are told."""
        return self._book.standing(policy)

    def pickers(self, policy: str) -> tuple[Picker, ...]:
        """The policy's connected pickers by identity; of two streams of one identity the newer one counts."""
        standing = self._book.standing(policy)
        current = standing.applied if isinstance(standing, Published) else None
        newest = {stream.opened.identity: stream for stream in self._streams.get(policy, ())}
        return tuple(newest[identity].picker(current) for identity in sorted(newest))

    @property
    def followed(self) -> Mapping[str, int]:
        """Streams open now, by policy, those included that do not exist."""
        return {policy: len(streams) for policy, streams in self._streams.items()}

    async def follow(self, context: _Context) -> None:
        """One picker's stream, from its opening to its end."""
        try:
            await self._turn_away_unless_serving(context)
            stream = _Stream(context, await self._opening(context))
            # It may have been told to stand by meanwhile.
            await self._turn_away_unless_serving(context)
            with self._open(stream):
                await self._exchange(stream)
            if stream.closed is not None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, stream.closed)
        except* DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "what was sent is no message of a picker")

    async def _turn_away_unless_serving(self, context: _Context) -> None:
        if self._closed is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._closed)

    async def _opening(self, context: _Context) -> pb.Open:
        try:
            async with asyncio.timeout(self._open_seconds):
                request = cast("object", await context.read())
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the stream was not opened in time")
        if not isinstance(request, pb.FollowRequest) or not request.HasField("open"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be `open`")
        opened = request.open
        if not re.fullmatch(POLICY_PATTERN, opened.policy):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "policy: must be namespace/name")
        if not opened.identity:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "identity: must not be empty")
        return opened

    @contextmanager
    def _open(self, stream: _Stream) -> Iterator[None]:
        """Keep the stream among those of its policy."""
        policy = stream.opened.policy
        streams = self._streams.setdefault(policy, {})
        streams[stream] = None
        log.info("picker connected", policy=policy, picker=stream.opened.identity, version=stream.opened.version)
        self._hear(stream, stream.applied)
        try:
            yield
        finally:
            del streams[stream]
            if not streams:
                del self._streams[policy]
            log.info("picker gone", policy=policy, picker=stream.opened.identity)
            self._changed(policy)

    async def _exchange(self, stream: _Stream) -> None:
        """Tell and hear at once, until the picker leaves or is sent away."""
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(self._tell(stream))
            hearing = tasks.create_task(self._listen(stream))
            leaving = tasks.create_task(stream.leaving.wait())
            try:
                await asyncio.wait((telling, hearing, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (telling, hearing, leaving):
                    task.cancel()

    async def _tell(self, stream: _Stream) -> None:
        told: Published | Absent | None = None
        with suppress(grpc.aio.InternalError):  # how a write says that the picker is gone
            while True:
                standing = self._book.standing(stream.opened.policy)
                if standing == told:
                    await stream.news.wait()
                    stream.news.clear()
                else:
                    await stream.context.write(standing.message)
                    told = standing

    async def _listen(self, stream: _Stream) -> None:
        while isinstance(request := await stream.context.read(), pb.FollowRequest):
            match request.WhichOneof("message"):
                case "acknowledgement":
                    self._take_acknowledgement(stream, request.acknowledgement)
                case "counters":
                    stream.counters = wire.read_counters(request.counters)
                    self._changed(stream.opened.policy)
                case _:
                    log.debug("message of a newer picker ignored", picker=stream.opened.identity)

    def _take_acknowledgement(self, stream: _Stream, message: pb.Acknowledgement) -> None:
        if message.refusal and message.refusal != stream.refusal:
            log.warning(
                "picker refused a snapshot",
                policy=stream.opened.policy,
                picker=stream.opened.identity,
                snapshot=message.snapshot_id,
                problem=message.refusal,
            )
        stream.refusal = message.refusal or None
        self._hear(stream, wire.read_applied(message))

    def _hear(self, stream: _Stream, applied: Applied | None) -> None:
        """Take note of what a picker has in force; it takes nothing with a smaller id than that."""
        policy = stream.opened.policy
        stream.applied = applied
        if applied is not None and self._book.lift(policy, applied, self._clock()):
            log.info("ids lifted above a picker's", policy=policy, picker=stream.opened.identity, id=applied.id)
            self._wake(policy)
        self._changed(policy)

    def _wake(self, policy: str) -> None:
        for stream in self._streams.get(policy, ()):
            stream.news.set()

    def _close(self, reason: str) -> None:
        if self._closed is None:
            log.info("feed serves no more", reason=reason)
        self._closed = reason
        for streams in self._streams.values():
            for stream in streams:
                stream.closed = reason
                stream.leaving.set()


class _Stream:
    """One picker's stream and what it said."""

    def __init__(self, context: _Context, opened: pb.Open) -> None:
        self.context = context
        self.opened = opened
        self.applied = wire.read_applied(opened)
        self.refusal: str | None = None
        self.counters: Counters | None = None
        self.news = asyncio.Event()
        """Set when there may be something to tell."""
        self.leaving = asyncio.Event()
        self.closed: str | None = None
        """Why the picker is sent away."""

    def picker(self, current: Applied | None) -> Picker:
        return Picker(
            identity=self.opened.identity,
            version=self.opened.version,
            address=self.context.peer(),
            applied=self.applied,
            current=self.applied is not None and self.applied == current,
            refusal=self.refusal,
            counters=self.counters,
        )


class _Servicer(CapacityFeedServicer):
    def __init__(self, feed: FeedServer) -> None:
        self._feed = feed

    async def Follow(self, requests: object, context: _Context) -> None:  # noqa: N802  # the generated code's name
        await self._feed.follow(context)
