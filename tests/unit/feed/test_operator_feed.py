from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from support.feeds import POLICY, Follower, ScriptedOperator, ScriptedStream, capacity, following, recorded
from thunderagent_epp import __version__
from thunderagent_epp.feed import capacity_feed_pb2 as pb
from thunderagent_epp.feed.operator_feed import Backoff, OperatorFeed, Unready
from thunderagent_epp.feed.wire import Applied, Counters, write_snapshot
from thunderagent_epp.scheduling.capacity import WorkerRank
from thunderagent_epp.snapshot import Snapshot


def snapshot(id: int, *workers: str) -> Snapshot:
    return Snapshot(id, capacity(*workers))


@pytest.fixture
async def operator() -> AsyncIterator[ScriptedOperator]:
    async with ScriptedOperator().serving() as operator:
        yield operator


@asynccontextmanager
async def both(operator: ScriptedOperator, **options: object) -> AsyncIterator[tuple[Follower, ScriptedStream]]:
    """A picker and its stream, opened."""
    async with following(operator.target, **options) as follower:
        stream = await operator.next()
        await stream.opened.get()
        yield follower, stream


async def test_a_stream_is_opened_with_policy_and_identity(operator: ScriptedOperator) -> None:
    async with following(operator.target, "llm/epp-7"):
        stream = await operator.next()
        assert await stream.opened.get() == pb.Open(policy="llm/coder", identity="llm/epp-7", version=__version__)


async def test_a_snapshot_is_published_and_acknowledged(operator: ScriptedOperator) -> None:
    async with both(operator) as (follower, stream):
        message = write_snapshot(snapshot(7, "a", "b"))
        await stream.send(message)
        assert await follower.published.get() == snapshot(7, "a", "b")
        in_force = pb.Applied(id=7, content_hash=message.content_hash)
        assert await stream.acknowledged.get() == pb.Acknowledgement(snapshot_id=7, applied=in_force)
        assert follower.feed.applied == Applied(7, message.content_hash)
        assert follower.feed.connected


async def test_a_newer_snapshot_takes_the_place_of_the_one_before(operator: ScriptedOperator) -> None:
    async with both(operator) as (follower, stream):
        await stream.send(write_snapshot(snapshot(7, "a")))
        await stream.send(write_snapshot(snapshot(9, "b")))
        assert [await follower.published.get(), await follower.published.get()] == [snapshot(7, "a"), snapshot(9, "b")]


async def test_ids_never_go_back(operator: ScriptedOperator) -> None:
    async with both(operator) as (follower, stream):
        message = write_snapshot(snapshot(7, "a"))
        await stream.send(message)
        await stream.acknowledged.get()
        await stream.send(write_snapshot(snapshot(6, "b")))
        assert await stream.acknowledged.get() == pb.Acknowledgement(
            snapshot_id=6,
            refusal="not newer than snapshot 7, which is in force",
            applied=pb.Applied(id=7, content_hash=message.content_hash),
        )
        await stream.send(write_snapshot(snapshot(7, "another content")))
        assert (await stream.acknowledged.get()).refusal == "not newer than snapshot 7, which is in force"
        assert await follower.published.get() == snapshot(7, "a")
        assert follower.published.empty()


async def test_the_snapshot_in_force_is_acknowledged_again_but_not_published_again(operator: ScriptedOperator) -> None:
    async with both(operator) as (follower, stream):
        for _ in range(2):
            await stream.send(write_snapshot(snapshot(7, "a")))
            assert (await stream.acknowledged.get()).refusal == ""
        assert follower.published.qsize() == 1


async def test_a_snapshot_that_cannot_be_applied_is_refused_and_the_last_one_stays(operator: ScriptedOperator) -> None:
    async with both(operator) as (follower, stream):
        good = write_snapshot(snapshot(7, "a"))
        await stream.send(good)
        await stream.acknowledged.get()
        bad = write_snapshot(snapshot(8, "b"))
        bad.admission.pause_threshold = 1.5
        await stream.send(bad)
        reason = "admission.pause_threshold: Input should be less than or equal to 1"
        assert await stream.acknowledged.get() == pb.Acknowledgement(
            snapshot_id=8, refusal=reason, applied=pb.Applied(id=7, content_hash=good.content_hash)
        )
        assert (follower.feed.refusal, follower.feed.refusals) == (reason, 1)
        assert follower.feed.applied == Applied(7, good.content_hash)
        assert follower.published.qsize() == 1
        await stream.send(write_snapshot(snapshot(9, "b")))
        assert (await stream.acknowledged.get()).applied.id == 9
        assert (follower.feed.refusal, follower.feed.refusals) == (None, 1)
        assert follower.unready.empty()


async def test_the_first_snapshot_may_be_refused_too(operator: ScriptedOperator) -> None:
    async with both(operator) as (follower, stream):
        await stream.send(pb.Snapshot(id=1, admission=pb.Admission(policy="Prophetic")))
        answer = await stream.acknowledged.get()
        assert answer.refusal == "admission.policy: Input should be 'Disabled', 'Classic' or 'Rotation'"
        assert not answer.HasField("applied")
        assert follower.feed.applied is None


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ValueError("disaggregation: not supported"), "disaggregation: not supported"),
        (KeyError("a/0"), "internal error: KeyError: 'a/0'"),
    ],
)
async def test_what_the_picker_cannot_take_is_refused(
    operator: ScriptedOperator, problem: Exception, reason: str
) -> None:
    async with both(operator) as (follower, stream):
        follower.problem = problem
        await stream.send(write_snapshot(snapshot(7, "a")))
        assert (await stream.acknowledged.get()).refusal == reason
        follower.problem = None
        await stream.send(write_snapshot(snapshot(8, "a")))
        assert (await stream.acknowledged.get()).refusal == ""


async def test_messages_and_fields_of_a_newer_operator_are_ignored(operator: ScriptedOperator) -> None:
    unknown_message = b"\xba\x38\x03new"  # field 903, three bytes
    async with both(operator) as (follower, stream):
        await stream.send(unknown_message)
        message = pb.FollowResponse(snapshot=write_snapshot(snapshot(7, "a"))).SerializeToString()
        await stream.send(message + unknown_message)
        assert await follower.published.get() == snapshot(7, "a")


async def test_counters_are_told_at_once_and_when_they_change(operator: ScriptedOperator) -> None:
    async with both(operator) as (follower, stream):
        await stream.send(write_snapshot(snapshot(7, "a")))
        assert await stream.counted.get() == pb.Counters()
        follower.counters = Counters(programs=3, paused=1, waiting=2, tracked=4, used={WorkerRank("a"): 500})
        assert await stream.counted.get() == pb.Counters(
            programs=3, paused=1, waiting=2, tracked=4, used=[pb.Charge(worker="a", rank=0, tokens=500)]
        )
        # Told at most a thousand times a second, and ten acknowledgements long nothing new: nothing is told.
        for id in range(8, 18):
            await stream.send(write_snapshot(snapshot(id, "a")))
            await stream.acknowledged.get()
        assert stream.counted.empty()


async def test_counters_that_change_all_the_time_wait_for_their_turn(operator: ScriptedOperator) -> None:
    async with both(operator, report_seconds=3600) as (follower, stream):
        await stream.send(write_snapshot(snapshot(7, "a")))
        await stream.counted.get()
        for id in range(8, 18):
            follower.counters = Counters(programs=id)
            await stream.send(write_snapshot(snapshot(id, "a")))
            await stream.acknowledged.get()
        assert stream.counted.empty()


async def test_a_stream_that_ends_is_opened_again_with_what_is_in_force(operator: ScriptedOperator) -> None:
    async with both(operator) as (follower, stream):
        message = write_snapshot(snapshot(7, "a"))
        await stream.send(message)
        await stream.acknowledged.get()
        stream.end()
        again = await operator.next()
        assert (await again.opened.get()).applied == pb.Applied(id=7, content_hash=message.content_hash)
        assert not follower.feed.connected
        await again.send(write_snapshot(snapshot(8, "b")))
        assert (await again.acknowledged.get()).applied.id == 8
        assert await again.counted.get() == pb.Counters()


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT])
async def test_however_a_stream_ends_another_is_opened(operator: ScriptedOperator, code: grpc.StatusCode) -> None:
    async with both(operator) as (_, stream):
        stream.end(code)
        again = await operator.next()
        await again.send(write_snapshot(snapshot(7, "a")))
        await again.acknowledged.get()
        again.end(code)
        assert (await (await operator.next()).opened.get()).applied.id == 7


async def test_what_is_no_message_ends_the_stream_and_another_is_opened(operator: ScriptedOperator) -> None:
    async with both(operator) as (_, stream):
        await stream.send(b"\xff")
        again = await operator.next()
        await again.send(write_snapshot(snapshot(7, "a")))
        await again.send(b"\xff")
        assert (await (await operator.next()).opened.get()).applied.id == 7


async def test_an_operator_that_says_nothing_is_left(operator: ScriptedOperator) -> None:
    async with both(operator, answer_seconds=0.05) as (_, stream):
        await stream.gone.wait()
        await operator.next()


async def test_a_policy_that_does_not_exist_makes_unready_until_it_appears(operator: ScriptedOperator) -> None:
    async with both(operator) as (follower, stream):
        await stream.send(pb.NoSnapshot(reason=pb.NoSnapshot.REASON_NOT_FOUND))
        assert await follower.unready.get() is Unready.POLICY_NOT_FOUND
        assert str(follower.feed.unready) == "policy_not_found"
        await stream.send(write_snapshot(snapshot(7, "a")))
        assert await follower.unready.get() is None
        assert await follower.published.get() == snapshot(7, "a")
        assert follower.feed.unready is None


async def test_a_deleted_policy_makes_unready_while_its_last_snapshot_stays(operator: ScriptedOperator) -> None:
    async with both(operator) as (follower, stream):
        await stream.send(write_snapshot(snapshot(7, "a")))
        await stream.send(pb.NoSnapshot(reason=pb.NoSnapshot.REASON_DELETED))
        assert await follower.unready.get() is Unready.POLICY_DELETED
        assert follower.feed.applied is not None
        assert follower.feed.applied.id == 7
        # It stays so while the operator is away …
        stream.end()
        again = await operator.next()
        assert follower.unready.empty()
        # … and until the policy is back, though its snapshot be refused.
        await again.send(pb.Snapshot(id=8, admission=pb.Admission(policy="Prophetic")))
        assert await follower.unready.get() is None


@pytest.mark.parametrize("reason", [pb.NoSnapshot.REASON_NOT_ACCEPTED, pb.NoSnapshot.REASON_UNSPECIFIED, 77])
async def test_a_policy_without_a_usable_version_changes_no_readiness(
    operator: ScriptedOperator, reason: pb.NoSnapshot.Reason
) -> None:
    async with both(operator) as (follower, stream):
        await stream.send(pb.NoSnapshot(reason=reason, detail="spec.workers: is required"))
        await stream.send(write_snapshot(snapshot(7, "a")))
        await follower.published.get()
        assert follower.unready.empty()


async def test_an_operator_that_is_away_changes_no_readiness_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, operator: ScriptedOperator
) -> None:
    log = recorded(monkeypatch, "thunderagent_epp.feed.operator_feed")
    async with both(operator) as (follower, stream):
        await stream.send(write_snapshot(snapshot(7, "a")))
        await stream.acknowledged.get()
        stream.end()
        for _ in range(5):
            (await operator.next()).end()
        # gRPC may give up a connection of its own accord meanwhile; that would be another kind, and said once, too.
        ended = [event for event in log.of("warning") if event["problem"] == "as the test wants it"]
        assert len(ended) == 1
        assert ended[0] == {
            "level": "warning",
            "event": "operator cannot be followed",
            "operator": operator.target,
            "snapshot": 7,
            "code": "UNAVAILABLE",
            "problem": "as the test wants it",
        }
        assert follower.feed.applied is not None
        assert follower.unready.empty()
        # Back, and away again: said again.
        back = await operator.next()
        await back.send(write_snapshot(snapshot(8, "a")))
        await back.acknowledged.get()
        back.end()
        await log.until("warning", len(log.of("warning")) + 1)
        assert [event["event"] for event in log.of("info")] == [
            "following the operator",
            "snapshot in force",
            "following the operator",
        ]


async def test_an_operator_that_was_never_there_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log = recorded(monkeypatch, "thunderagent_epp.feed.operator_feed")
    with socket.socket() as taken:
        # Bound but not listening: connections are refused, and nobody else can have the port.
        taken.bind(("127.0.0.1", 0))
        async with following(f"127.0.0.1:{taken.getsockname()[1]}"):
            await log.until("debug", 4)
    assert len(log.of("warning")) == 1
    assert log.of("warning")[0]["code"] == "UNAVAILABLE"


class Line:
    """A way to the operator on which connections can go dead without being closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0
        self.dead = 0
        """Connections up to this one swallow what they are given."""
        self.target = ""

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Line]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._connections += 1
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._carry(source, sink, self._connections)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, connection: int) -> None:
        try:
            with suppress(ConnectionError):
                while content := await source.read(65536):
                    if connection > self.dead:
                        sink.write(content)
        finally:
            sink.transport.abort()


async def test_a_dead_connection_is_noticed_by_its_silence(operator: ScriptedOperator) -> None:
    async with (
        Line(int(operator.target.rpartition(":")[2])).up() as line,
        following(line.target, keepalive_seconds=0.1) as follower,
    ):
        stream = await operator.next()
        await stream.send(write_snapshot(snapshot(7, "a")))
        await stream.acknowledged.get()
        line.dead = 1
        again = await operator.next()
        assert (await again.opened.get()).applied.id == 7
        assert follower.unready.empty()


async def test_a_feed_that_is_cancelled_leaves_its_operator(operator: ScriptedOperator) -> None:
    async with both(operator) as (_, stream):
        await stream.send(write_snapshot(snapshot(7, "a")))
        await stream.acknowledged.get()
    await stream.gone.wait()
    assert operator.streams.empty()


def test_waits_double_up_to_their_cap_and_are_cut_by_half_at_most() -> None:
    backoff = Backoff(first_seconds=0.1, cap_seconds=1.0)
    assert [backoff.seconds(failures, jitter=0.0) for failures in (1, 2, 3, 4, 5, 100_000)] == [
        0.1,
        0.2,
        0.4,
        0.8,
        1.0,
        1.0,
    ]
    assert backoff.seconds(5, jitter=0.5) == 0.75
    assert backoff.seconds(5, jitter=1.0) == 0.5


@pytest.mark.parametrize("target", ["operator", "operator:", "http://operator:9002", "::1:9002", ":9002", "a b:1"])
def test_a_target_of_another_form_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        Follower(target)


@pytest.mark.parametrize("target", ["operator.thunderagent.svc:9002", "10.0.0.1:1", "[fd00::1]:9002"])
def test_names_and_addresses_are_targets(target: str) -> None:
    assert not Follower(target).feed.connected


@pytest.mark.parametrize("policy", ["coder", "llm/", "/coder", "a/b/c", ""])
def test_a_policy_of_another_form_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match="must be NAMESPACE/NAME"):
        OperatorFeed("a:1", policy, "me", lambda _: None, counters=Counters, unready=lambda _: None)


def test_the_policy_of_these_tests_is_one() -> None:
    assert POLICY == "llm/coder"
