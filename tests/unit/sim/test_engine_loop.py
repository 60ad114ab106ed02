"""The loop around the engine: answers arrive as they are made, an idle engine sleeps, a departure frees its blocks."""

import asyncio
import contextlib

from virtual_clock import VirtualClock

from thunderagent_sim.engine import Engine, EngineOptions, Sequence
from thunderagent_sim.engine_loop import EngineLoop


@contextlib.asynccontextmanager
async def running(clock: VirtualClock, finished: list[Sequence] | None = None, step_seconds: float = 0.1):
    options = EngineOptions(blocks=100, prefill_tokens_per_second=100.0, decode_tokens_per_second=10.0)
    loop = EngineLoop(Engine(options), clock, step_seconds, None if finished is None else finished.append)
    task = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_pieces_come_token_by_token_and_make_up_the_answer():
    async with running(VirtualClock()) as loop:
        with loop.generate(b"abcd" * 50, 5, "length") as generation:
            pieces = [piece async for piece in generation.pieces()]
        assert [len(piece) for piece in pieces] == [4, 4, 4, 4, 4]
        assert "".join(pieces) == generation.sequence.answer.decode()


async def test_a_longer_step_sends_several_tokens_at_once():
    async with running(VirtualClock(), step_seconds=0.5) as loop:
        with loop.generate(b"abcd" * 50, 11, "length") as generation:
            pieces = [piece async for piece in generation.pieces()]
        assert [len(piece) // 4 for piece in pieces] == [1, 5, 5]


async def test_an_idle_engine_causes_no_wake_up_and_a_request_ends_its_sleep():
    clock = VirtualClock()
    async with running(clock) as loop:
        for _ in range(50):
            await asyncio.sleep(0)
        assert clock.sleeps == 0
        for _ in range(2):
            with loop.generate(b"abcd" * 50, 5, "length") as generation:
                await generation.finished()
            after = clock.sleeps
            for _ in range(50):
                await asyncio.sleep(0)
            assert clock.sleeps == after


async def test_only_a_whole_answer_counts_as_finished():
    finished: list[Sequence] = []
    async with running(VirtualClock(), finished) as loop:
        with loop.generate(b"abcd", 500, "length") as left:
            await anext(left.pieces())
        with loop.generate(b"abcd", 5, "length") as answered:
            await answered.finished()
        assert finished == [answered.sequence]


async def test_leaving_the_scope_frees_the_blocks_at_once():
    async with running(VirtualClock()) as loop:
        with loop.generate(b"abcd" * 50, 500, "length") as generation:
            await anext(generation.pieces())
            assert loop.engine.cache.used == 4
        assert loop.engine.cache.used == 0
        assert loop.engine.idle


async def test_a_cancelled_waiter_frees_its_blocks_too():
    async with running(VirtualClock(sleeps_allowed=1)) as loop:
        started = asyncio.Event()

        async def answer() -> None:
            with loop.generate(b"abcd" * 50, 1500, "length") as generation:
                started.set()
                await generation.finished()

        task = asyncio.create_task(answer())
        await started.wait()
        assert loop.engine.cache.used == 4
        task.cancel()
        await asyncio.wait([task])
        assert loop.engine.idle
        assert loop.engine.counters.finished_requests["abort"] == 1
