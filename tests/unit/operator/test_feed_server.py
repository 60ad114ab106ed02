from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from support.feeds import POLICY, capacity, following, recorded
from thunderagent_epp.feed import capacity_feed_pb2 as pb
from thunderagent_epp.feed.operator_feed import Unready
from thunderagent_epp.feed.wire import Applied, Counters, read_snapshot
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, WorkerRank
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_operator.feed import FeedServer, Picker
from thunderagent_operator.snapshot_book import Published


class Operator:
    """A feed server, and a way to wait for what its pickers say."""

    def __init__(self, address: str = "127.0.0.1:0", *, now: float = 1000.0, **options: Any) -> None:
        self._news = asyncio.Event()
        self.changed: list[str] = []
        self.feed = FeedServer(address, changed=self._changed, clock=lambda: now, **options)

    def _changed(self, policy: str) -> None:
        self.changed.append(policy)
        self._news.set()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.feed.port}"

    def put(self, *workers: str, policy: str = POLICY) -> Published:
        return self.publish(capacity(*workers), policy)

    def publish(self, content: CapacitySnapshot, policy: str = POLICY) -> Published:
        return self.feed.publish(policy, content, AdmissionPolicy(), RequestPolicy())

    async def until(self, reached: Callable[[tuple[Picker, ...]], bool], policy: str = POLICY) -> tuple[Picker, ...]:
        """The policy's pickers once they are so."""
        while not reached(pickers := self.feed.pickers(policy)):
            self._news.clear()
            await self._news.wait()
        return pickers


@asynccontextmanager
async def standing_by(*arguments: str, **options: Any) -> AsyncIterator[Operator]:
    operator = Operator(*arguments, **options)
    await operator.feed.start()
    try:
        yield operator
    finally:
        await operator.feed.stop(0)


@asynccontextmanager
async def leading(*arguments: str, **options: Any) -> AsyncIterator[Operator]:
    async with standing_by(*arguments, **options) as operator:
        operator.feed.serve()
        yield operator


Stream = grpc.aio.StreamStreamCall[Any, Any]


@asynccontextmanager
async def stream(operator: Operator) -> AsyncIterator[Stream]:
    """A stream as it is on the wire, not opened yet."""
    async with grpc.aio.insecure_channel(
        operator.target,
        options=[("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
    ) as channel:
        yield channel.stream_stream(
            "/thunderagent.feed.v1.CapacityFeed/Follow",
            request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            response_deserializer=pb.FollowResponse.FromString,
        )()


@asynccontextmanager
async def opened(operator: Operator, identity: str = "llm/epp-0", **fields: Any) -> AsyncIterator[Stream]:
    async with stream(operator) as call:
        await call.write(pb.FollowRequest(open=pb.Open(policy=POLICY, identity=identity, **fields)))
        yield call


async def snapshot_of(call: Stream) -> tuple[int, list[str]]:
    """The next message: id and worker names of its snapshot."""
    message = await call.read()
    assert isinstance(message, pb.FollowResponse)
    assert message.WhichOneof("message") == "snapshot"
    return message.snapshot.id, [worker.name for worker in message.snapshot.workers]


async def absence_of(call: Stream) -> tuple[int, str]:
    message = await call.read()
    assert isinstance(message, pb.FollowResponse)
    assert message.WhichOneof("message") == "no_snapshot"
    return message.no_snapshot.reason, message.no_snapshot.detail


async def end_of(call: Stream) -> tuple[grpc.StatusCode, str]:
    """How a stream ends, whatever comes before."""
    code = await call.code()
    return code, await call.details()


async def test_the_current_snapshot_comes_at_once_and_then_every_newer_one() -> None:
    async with leading() as operator:
        operator.put("a")
        async with opened(operator) as call:
            assert await snapshot_of(call) == (1_000_000, ["a"])
            operator.put("a", "b")
            assert await snapshot_of(call) == (1_000_001, ["a", "b"])


async def test_what_is_sent_is_the_whole_content() -> None:
    async with leading() as operator:
        published = operator.put("a", "b")
        async with opened(operator) as call:
            message = await call.read()
            assert read_snapshot(message.snapshot) == published.snapshot
            assert message.snapshot.content_hash == published.content_hash


async def test_the_same_content_is_not_sent_again() -> None:
    async with leading() as operator:
        operator.put("a")
        async with opened(operator) as call:
            await snapshot_of(call)
            operator.put("a")
            operator.put("b")
            assert await snapshot_of(call) == (1_000_001, ["b"])


async def test_every_picker_of_a_policy_is_told_and_no_other() -> None:
    async with leading() as operator, opened(operator, "llm/epp-0") as first, opened(operator, "llm/epp-1") as second:
        assert await absence_of(first) == await absence_of(second) == (pb.NoSnapshot.REASON_NOT_FOUND, "")
        operator.put("x", policy="llm/other")
        operator.put("a")
        assert await snapshot_of(first) == await snapshot_of(second) == (1_000_000, ["a"])


async def test_a_policy_that_does_not_exist_is_told_and_followed_up() -> None:
    async with leading() as operator, opened(operator) as call:
        assert await absence_of(call) == (pb.NoSnapshot.REASON_NOT_FOUND, "")
        operator.feed.withhold(POLICY, "spec.workers: is required")
        assert await absence_of(call) == (pb.NoSnapshot.REASON_NOT_ACCEPTED, "spec.workers: is required")
        operator.put("a")
        assert await snapshot_of(call) == (1_000_000, ["a"])


async def test_the_end_of_a_policy_is_told_and_so_is_its_return() -> None:
    async with leading() as operator:
        operator.put("a")
        async with opened(operator) as call:
            await snapshot_of(call)
            operator.feed.delete(POLICY)
            assert await absence_of(call) == (pb.NoSnapshot.REASON_DELETED, "")
            operator.put("a")
            assert await snapshot_of(call) == (1_000_001, ["a"])


async def test_a_bad_edit_is_not_told_while_a_good_snapshot_is_in_force() -> None:
    async with leading() as operator:
        operator.put("a")
        async with opened(operator) as call:
            await snapshot_of(call)
            operator.feed.withhold(POLICY, "spec.workers: is required")
            operator.put("b")
            assert await snapshot_of(call) == (1_000_001, ["b"])


LONG_NAMES = [f"{number:03}-{'long' * 2500}" for number in range(200)]
"""A snapshot of them takes two megabytes: a connection holds a few."""


async def test_a_slow_picker_gets_the_newest_only() -> None:
    async with leading() as operator, opened(operator) as slow:
        for tokens in range(1, 31):
            operator.publish(capacity(*LONG_NAMES, tokens=tokens))
            # By the time another picker has it, the slow one would have been sent it too.
            async with opened(operator, "llm/quick") as quick:
                await quick.read()
        received = []
        while not received or received[-1] < 1_000_029:
            message = await slow.read()
            if message.HasField("snapshot"):
                received.append(message.snapshot.id)
        assert len(received) < 15
        assert received == sorted(set(received))


async def test_a_picker_that_vanishes_while_it_is_written_to_is_let_go_without_noise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with leading() as operator:
        for tokens in range(1, 21):
            async with opened(operator):
                operator.publish(capacity(*LONG_NAMES, tokens=tokens))
                await operator.until(lambda pickers: len(pickers) == 1)
            await operator.until(lambda pickers: not pickers)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_standby_refuses_pickers_until_it_leads() -> None:
    async with standing_by() as operator:
        operator.put("a")
        assert not operator.feed.serving
        async with opened(operator) as call:
            assert await end_of(call) == (grpc.StatusCode.UNAVAILABLE, "this operator does not lead")
        operator.feed.serve()
        assert operator.feed.serving
        async with opened(operator) as call:
            assert await snapshot_of(call) == (1_000_000, ["a"])


async def test_losing_the_lead_ends_every_stream() -> None:
    async with leading() as operator, AsyncExitStack() as streams:
        operator.put("a")
        calls = [await streams.enter_async_context(opened(operator, f"llm/epp-{number}")) for number in range(3)]
        for call in calls:
            await snapshot_of(call)
        operator.feed.pause()
        for call in calls:
            assert await end_of(call) == (grpc.StatusCode.UNAVAILABLE, "this operator does not lead")
        await operator.until(lambda pickers: not pickers)


async def test_losing_the_lead_does_not_wait_for_a_picker_that_does_not_read() -> None:
    async with leading() as operator:
        operator.publish(capacity(*LONG_NAMES))
        async with opened(operator):
            await operator.until(lambda pickers: len(pickers) == 1)
            operator.feed.pause()
            await operator.until(lambda pickers: not pickers)


async def test_ids_of_a_new_leader_are_those_of_the_moment_it_leads() -> None:
    now = 1000.0
    feed = FeedServer("127.0.0.1:0", clock=lambda: now)
    feed.publish(POLICY, capacity("a"), AdmissionPolicy(), RequestPolicy())
    now = 2000.0
    feed.serve()
    standing = feed.standing(POLICY)
    assert isinstance(standing, Published)
    assert standing.snapshot.id == 2_000_000


async def test_ids_are_lifted_above_those_a_picker_brings() -> None:
    async with leading() as operator:
        operator.put("a")
        applied = pb.Applied(id=7_000_000, content_hash="of another operator")
        async with opened(operator) as first:
            assert await snapshot_of(first) == (1_000_000, ["a"])
            async with opened(operator, "llm/epp-1", applied=applied) as second:
                assert await snapshot_of(second) == (7_000_001, ["a"])
                assert await snapshot_of(first) == (7_000_001, ["a"])


async def test_a_policy_that_appears_is_above_what_its_pickers_have() -> None:
    async with leading() as operator, opened(operator, applied=pb.Applied(id=7_000_000, content_hash="x")) as call:
        await absence_of(call)
        operator.put("a")
        assert await snapshot_of(call) == (7_000_001, ["a"])


async def test_an_impossible_claim_lifts_nothing() -> None:
    async with leading() as operator, opened(operator, applied=pb.Applied(id=2**63 - 1, content_hash="x")) as call:
        await absence_of(call)
        operator.put("a")
        assert await snapshot_of(call) == (1_000_000, ["a"])


async def test_the_snapshot_a_picker_has_already_keeps_its_id() -> None:
    async with leading() as operator:
        published = operator.put("a")
        applied = pb.Applied(id=1_000_000, content_hash=published.content_hash)
        async with opened(operator, applied=applied, version="0.9") as call:
            assert await snapshot_of(call) == (1_000_000, ["a"])
            (picker,) = operator.feed.pickers(POLICY)
            assert (picker.current, picker.version) == (True, "0.9")


async def test_pickers_are_known_by_what_they_last_said() -> None:
    async with leading() as operator:
        published = operator.put("a")
        async with opened(operator, version="0.1.0") as call:
            (picker,) = await operator.until(lambda pickers: len(pickers) == 1)
            assert picker.address.startswith("ipv4:127.0.0.1:")
            assert picker == Picker("llm/epp-0", "0.1.0", picker.address, None, False, None, None)
            await call.write(
                pb.FollowRequest(
                    acknowledgement=pb.Acknowledgement(
                        snapshot_id=1_000_000,
                        applied=pb.Applied(id=1_000_000, content_hash=published.content_hash),
                    )
                )
            )
            (picker,) = await operator.until(lambda pickers: pickers[0].current)
            assert picker.applied == Applied(1_000_000, published.content_hash)
            charge = pb.Charge(worker="a", rank=1, tokens=900)
            counters = pb.Counters(programs=5, paused=2, waiting=1, tracked=3, used=[charge])
            await call.write(pb.FollowRequest(counters=counters))
            (picker,) = await operator.until(lambda pickers: pickers[0].counters is not None)
            assert picker.counters == Counters(5, 2, 1, 3, {WorkerRank("a", 1): 900})
            operator.put("b")
            (picker,) = operator.feed.pickers(POLICY)
            assert not picker.current
        assert await operator.until(lambda pickers: not pickers) == ()
        assert set(operator.changed) == {POLICY}
        assert operator.feed.followed == {}


async def test_a_refusal_is_known_until_the_picker_applies_something(monkeypatch: pytest.MonkeyPatch) -> None:
    log = recorded(monkeypatch, "thunderagent_operator.feed")
    async with leading() as operator:
        published = operator.put("a")
        async with opened(operator) as call:
            for snapshot_id in (1_000_000, 1_000_001):
                refused = pb.Acknowledgement(snapshot_id=snapshot_id, refusal="admission.policy: unknown")
                await call.write(pb.FollowRequest(acknowledgement=refused))
            (picker,) = await operator.until(lambda pickers: any(picker.refusal for picker in pickers))
            assert (picker.refusal, picker.current) == ("admission.policy: unknown", False)
            applied = pb.Applied(id=1_000_000, content_hash=published.content_hash)
            await call.write(pb.FollowRequest(acknowledgement=pb.Acknowledgement(snapshot_id=1, applied=applied)))
            (picker,) = await operator.until(lambda pickers: pickers[0].current)
            assert picker.refusal is None
    assert [event["event"] for event in log.of("warning")] == ["picker refused a snapshot"]


async def test_of_two_streams_of_one_picker_the_newer_one_counts() -> None:
    async with leading() as operator:
        published = operator.put("a")
        async with opened(operator, version="old"):
            await operator.until(lambda pickers: len(pickers) == 1)
            applied = pb.Applied(id=1_000_000, content_hash=published.content_hash)
            async with opened(operator, version="new", applied=applied):
                (picker,) = await operator.until(lambda pickers: pickers[0].version == "new")
                assert picker.current
                assert operator.feed.followed == {POLICY: 2}
            (picker,) = await operator.until(lambda pickers: pickers[0].version == "old")
            assert not picker.current


async def test_messages_of_a_newer_picker_are_ignored() -> None:
    unknown_message = b"\xba\x38\x03new"  # field 903, three bytes
    async with leading() as operator:
        operator.put("a")
        async with opened(operator) as call:
            await call.write(unknown_message)
            await call.write(pb.FollowRequest(counters=pb.Counters(programs=1)).SerializeToString() + unknown_message)
            (picker,) = await operator.until(lambda pickers: any(picker.counters for picker in pickers))
            assert picker.counters == Counters(programs=1)


@pytest.mark.parametrize(
    ("first", "details"),
    [
        (pb.FollowRequest(), "the first message must be `open`"),
        (pb.FollowRequest(counters=pb.Counters()), "the first message must be `open`"),
        (pb.FollowRequest(open=pb.Open(policy="coder", identity="me")), "policy: must be namespace/name"),
        (pb.FollowRequest(open=pb.Open(policy=POLICY)), "identity: must not be empty"),
        (b"\xff", "what was sent is no message of a picker"),
    ],
)
async def test_a_stream_that_is_not_opened_as_it_should_be_is_refused(
    first: pb.FollowRequest | bytes, details: str
) -> None:
    async with leading() as operator, stream(operator) as call:
        await call.write(first)
        assert await end_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, details)
        assert operator.feed.followed == {}


async def test_a_stream_that_is_closed_before_it_is_opened_is_refused() -> None:
    async with leading() as operator, stream(operator) as call:
        await call.done_writing()
        assert await end_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, "the first message must be `open`")


async def test_a_stream_that_is_never_opened_is_ended() -> None:
    async with leading(open_seconds=0.01) as operator, stream(operator) as call:
        assert await end_of(call) == (grpc.StatusCode.DEADLINE_EXCEEDED, "the stream was not opened in time")


async def test_what_is_no_message_ends_only_that_picker_s_stream() -> None:
    async with leading() as operator, opened(operator) as good, opened(operator, "llm/bad") as bad:
        await absence_of(good)
        await absence_of(bad)
        await bad.write(b"\xff")
        assert (await end_of(bad))[0] is grpc.StatusCode.INVALID_ARGUMENT
        operator.put("a")
        assert await snapshot_of(good) == (1_000_000, ["a"])


async def test_a_picker_that_closes_its_side_is_let_go() -> None:
    async with leading() as operator, opened(operator) as call:
        await absence_of(call)
        await call.done_writing()
        assert (await end_of(call))[0] is grpc.StatusCode.OK
        await operator.until(lambda pickers: not pickers)


async def test_shutting_down_ends_every_stream() -> None:
    async with leading() as operator, opened(operator) as call:
        await absence_of(call)
        await operator.feed.stop()
        assert await end_of(call) == (grpc.StatusCode.UNAVAILABLE, "this operator shuts down")


async def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    async with standing_by() as operator:
        second = FeedServer(operator.target)
        with pytest.raises(OSError, match=f"the feed cannot listen on {operator.target}: "):
            await second.start()
        await second.stop()


async def test_a_picker_follows_through_everything_that_happens_to_a_policy() -> None:
    async with leading() as operator, following(operator.target) as follower:
        assert await follower.unready.get() is Unready.POLICY_NOT_FOUND
        operator.put("a")
        assert (await follower.published.get()).id == 1_000_000
        assert await follower.unready.get() is None
        await operator.until(lambda pickers: pickers[0].current)
        follower.counters = Counters(programs=1, used={WorkerRank("a"): 10})
        await operator.until(lambda pickers: pickers[0].counters == follower.counters)
        operator.feed.delete(POLICY)
        assert await follower.unready.get() is Unready.POLICY_DELETED
        operator.put("b")
        assert (await follower.published.get()).id == 1_000_001
        assert await follower.unready.get() is None


async def test_a_picker_goes_on_while_its_operator_is_killed_and_takes_the_greater_ids_of_the_next() -> None:
    async with AsyncExitStack() as first:
        operator = await first.enter_async_context(leading())
        operator.put("a")
        async with following(operator.target) as follower:
            assert (await follower.published.get()).id == 1_000_000
            await first.aclose()
            async with leading(operator.target, now=2000.0) as successor:
                successor.put("a")
                assert (await follower.published.get()).id == 2_000_000
                await successor.until(lambda pickers: any(picker.current for picker in pickers))
                assert follower.unready.empty()


async def test_a_picker_takes_the_snapshots_of_an_operator_whose_clock_is_behind() -> None:
    async with AsyncExitStack() as first:
        operator = await first.enter_async_context(leading())
        operator.put("a")
        async with following(operator.target) as follower:
            assert (await follower.published.get()).id == 1_000_000
            await first.aclose()
            async with leading(operator.target, now=500.0) as successor:
                successor.put("b")
                assert (await follower.published.get()).id == 1_000_001
                assert follower.unready.empty()


async def test_a_picker_finds_the_leader_when_the_lead_changes() -> None:
    async with leading() as operator, following(operator.target) as follower:
        operator.put("a")
        await follower.published.get()
        operator.feed.pause()
        await operator.until(lambda pickers: not pickers)
        operator.put("b")
        operator.feed.serve()
        assert [worker.id.worker for worker in (await follower.published.get()).capacity.workers] == ["b"]
