"""Child processes: known to be ready, surely ended, and heard when they fail."""

import asyncio
import os
import sys

import pytest

from thunderagent_sim.processes import Child, PartError, first_of, running_child


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-u", "-c", program)


def port(line: str) -> int | None:
    return int(line.removeprefix("port ")) if line.startswith("port ") else None


async def test_a_child_announces_what_is_read_from_its_log() -> None:
    program = python("import time; print('loading'); print('port 7'); time.sleep(600)")
    async with running_child("worker-1", *program, remedy="try again") as child:
        assert await child.announces(port, 60) == 7


async def test_an_announcement_made_before_anybody_listened_counts() -> None:
    program = python("import time; print('port 7'); print('ready'); time.sleep(600)")
    async with running_child("worker-1", *program, remedy="try again") as child:
        await child.announces(lambda line: line == "ready" or None, 60)
        assert await child.announces(port, 60) == 7


async def test_a_child_that_ends_before_it_is_ready_is_named_with_its_last_words_and_what_to_do() -> None:
    program = python("import sys; print('loading'); sys.exit('no such model')")
    async with running_child("worker-1", *program, remedy="name another model") as child:
        with pytest.raises(PartError) as raised:
            await child.announces(port, 60)
    assert str(raised.value) == "worker-1 ended with exit status 1: no such model - name another model"


async def test_a_child_that_says_nothing_is_not_waited_for_for_ever() -> None:
    async with running_child("worker-1", *python("import time; time.sleep(600)"), remedy="try again") as child:
        with pytest.raises(PartError) as raised:
            await child.announces(port, 0.01)
    assert str(raised.value) == "worker-1 was not ready after 0.01 s: it said nothing - try again"


async def test_a_structured_log_line_is_quoted_for_people() -> None:
    entry = '{"time":"now","level":"error","logger":"feed","event":"policy file refused","line":3}'
    program = python(f"print('first'); print('second'); print('{entry}'); raise SystemExit(2)")
    async with running_child("picker", *program, remedy="mend it") as child:
        with pytest.raises(PartError) as raised:
            await child.ended()
    assert str(raised.value) == "picker ended with exit status 2: error: policy file refused line=3 - mend it"
    assert raised.value.log == ("first", "second")


async def test_a_killed_child_is_reported_as_killed() -> None:
    program = python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    async with running_child("picker", *program, remedy="mend it") as child:
        with pytest.raises(PartError, match=r"^picker was killed \(SIGKILL\) - "):
            await child.ended()


async def test_a_child_ended_by_another_signal_is_reported_with_it() -> None:
    program = python("import os, signal; print('bye'); os.kill(os.getpid(), signal.SIGTERM)")
    async with running_child("picker", *program, remedy="mend it") as child:
        with pytest.raises(PartError, match=r"^picker was ended by SIGTERM: bye - mend it$"):
            await child.ended()


async def test_a_command_that_is_not_there_is_a_part_that_fails() -> None:
    with pytest.raises(PartError, match=r"^picker .* - install it$"):
        async with running_child("picker", "/nowhere/picker", remedy="install it") as child:
            await child.ended()


async def test_whatever_ends_the_block_ends_the_child_and_its_children() -> None:
    program = python(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('port', child.pid)\n"
        "time.sleep(600)\n"
    )
    seen: list[Child] = []

    async def fail_with_a_child() -> None:
        async with running_child("worker-1", *program, remedy="try again") as child:
            seen.append(child)
            grandchild = await child.announces(port, 60)
            # Both write to the same pipe, and the block waits for its end: that it ends says that both have ended.
            assert os.getpgid(grandchild) == child.process.pid
            raise RuntimeError("anything")

    with pytest.raises(RuntimeError, match="anything"):
        await fail_with_a_child()
    assert seen[0].process.returncode == -9


async def test_the_first_to_end_ends_the_others() -> None:
    ended: list[str] = []

    async def forever() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("forever")
        raise AssertionError("never")

    async def soon() -> str:
        return "soon"

    assert await first_of(forever(), soon()) == "soon"
    assert ended == ["forever"]


async def test_what_the_first_raises_is_raised_as_it_is() -> None:
    async def fail() -> None:
        raise PartError("picker ended")

    with pytest.raises(PartError, match="picker ended"):
        await first_of(asyncio.Event().wait(), fail())


async def test_cancelling_the_wait_ends_all() -> None:
    ended: list[int] = []

    async def forever(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    waiting = asyncio.create_task(first_of(forever(1), forever(2)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sorted(ended) == [1, 2]
