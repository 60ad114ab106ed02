import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import virtual_time
from prometheus_client import CollectorRegistry

from thunderagent_epp.scheduling.capacity import WorkerRank
from thunderagent_operator.probes.http import Address, ProbeError
from thunderagent_operator.probes.plan import Question
from thunderagent_operator.probes.prober import Known, ProbeKey, Prober, ProbeTarget
from thunderagent_operator.probes.reading import Capacity
from thunderagent_operator.telemetry import ProbeMetrics, ProbeResult

KEY = ProbeKey("llm/coder", WorkerRank("a"))
TARGET = ProbeTarget(Address("10.0.0.1", 8000), incarnation="uid-a/0", engine="vllm", interval_seconds=10)
KNOWN = Known(Capacity(9168, 16))

PAGE = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="573"} 1.0\n'
SMALLER = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="500"} 1.0\n'
NOT_YET = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
REFUSED = ProbeError(ProbeResult.UNREACHABLE, "http://10.0.0.1:8000/metrics: Connection refused")


class NoJitter(Random):
    """Every wait the longest it may be, or with ``share`` 0 the shortest."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__(0)
        self._share = share

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) * self._share


@dataclass
class Fleet:
    """Workers that answer what they are told to, and the prober that asks them."""

    answers: list[bytes | Exception | None] = field(default_factory=lambda: [PAGE])
    """One after the other, the last one for ever."""
    asked: list[tuple[float, str]] = field(default_factory=list)
    changes: list[tuple[float, ProbeKey]] = field(default_factory=list)
    answer_seconds: float = 0.0
    running: int = 0
    most_running: int = 0
    concurrency: int = 32
    jitter: Random = field(default_factory=NoJitter)

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self.prober = Prober(
            self.fetch,
            lambda key: self.changes.append((self.now(), key)),
            ProbeMetrics(self.registry),
            random=self.jitter,
            concurrency=self.concurrency,
        )

    def now(self) -> float:
        return round(asyncio.get_running_loop().time(), 3)

    async def fetch(self, address: Address, question: Question) -> bytes | None:
        self.asked.append((self.now(), str(address.url(question))))
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.answer_seconds)
        finally:
            self.running -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def times(self) -> list[float]:
        return [time for time, _ in self.asked]

    def count(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def during(seconds: float, fleet: Fleet, script: Callable[[], Awaitable[None]]) -> None:
    """Run the prober beside a script, for so long in all."""

    async def main() -> None:
        running = asyncio.create_task(fleet.prober.run())
        await script()
        await asyncio.sleep(seconds - asyncio.get_running_loop().time())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    virtual_time.run(main())


def followed(fleet: Fleet, seconds: float, target: ProbeTarget = TARGET) -> Known:
    """What is known of a worker after following it for so long."""
    known = Known()

    async def script() -> None:
        nonlocal known
        fleet.prober.follow(KEY, target)
        await asyncio.sleep(seconds)
        known = fleet.prober.known(KEY)

    during(seconds, fleet, script)
    return known


def test_a_worker_is_probed_at_once_and_then_at_the_interval() -> None:
    fleet = Fleet()
    assert followed(fleet, 25) == KNOWN
    assert fleet.times() == [0, 11, 22]
    assert fleet.changes == [(0, KEY)]


def test_the_interval_is_jittered_by_a_tenth() -> None:
    fleet = Fleet(jitter=NoJitter(0))
    followed(fleet, 25)
    assert fleet.times() == [0, 9, 18]


def test_an_engine_that_is_still_starting_is_asked_again_soon_and_at_the_interval_at_last() -> None:
    fleet = Fleet(answers=[NOT_YET])
    assert followed(fleet, 40) == Known(None, "the worker does not tell its capacity")
    assert fleet.times() == [0, 1, 3, 7, 15, 25, 35]


def test_a_worker_that_fails_is_left_alone_for_longer_and_longer() -> None:
    fleet = Fleet(answers=[REFUSED])
    assert followed(fleet, 260) == Known(None, "http://10.0.0.1:8000/metrics: Connection refused")
    assert fleet.times() == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]


def test_a_retry_is_jittered_by_up_to_a_half() -> None:
    fleet = Fleet(answers=[REFUSED], jitter=NoJitter(0))
    followed(fleet, 20)
    assert fleet.times() == [0, 0.5, 1.5, 3.5, 7.5, 15.5]


def test_a_capacity_is_learnt_after_failures_and_the_interval_holds_again() -> None:
    fleet = Fleet(answers=[REFUSED, NOT_YET, PAGE])
    assert followed(fleet, 15) == KNOWN
    assert fleet.times() == [0, 1, 3, 14]
    assert fleet.changes == [(0, KEY), (1, KEY), (3, KEY)]


@pytest.mark.parametrize("answer", [REFUSED, NOT_YET, None, b"<html>", b"<html>\n", b""])
def test_a_probe_that_does_not_tell_keeps_the_last_value_of_the_incarnation(answer: bytes | Exception | None) -> None:
    fleet = Fleet(answers=[PAGE, answer])
    known = followed(fleet, 12)
    assert known.capacity == Capacity(9168, 16)
    assert known.trouble is not None


def test_a_capacity_that_changes_is_told() -> None:
    fleet = Fleet(answers=[PAGE, SMALLER])
    assert followed(fleet, 12) == Known(Capacity(8000, 16))
    assert fleet.changes == [(0, KEY), (11, KEY)]


def test_a_new_incarnation_is_probed_at_once_and_knows_nothing_before() -> None:
    fleet = Fleet(answers=[PAGE, SMALLER], answer_seconds=1)
    seen: list[Known] = []

    async def script() -> None:
        fleet.prober.follow(KEY, TARGET)
        await asyncio.sleep(5)
        fleet.prober.follow(KEY, replace(TARGET, incarnation="uid-a/1"))
        seen.append(fleet.prober.known(KEY))
        await asyncio.sleep(2)
        seen.append(fleet.prober.known(KEY))

    during(8, fleet, script)
    assert fleet.times() == [0, 5]
    assert seen == [Known(), Known(Capacity(8000, 16))]
    assert fleet.changes == [(1, KEY), (5, KEY), (6, KEY)]


def test_the_answer_of_an_incarnation_gone_by_is_thrown_away() -> None:
    fleet = Fleet(answers=[PAGE, REFUSED], answer_seconds=3)
    seen: list[Known] = []

    async def script() -> None:
        fleet.prober.follow(KEY, TARGET)
        await asyncio.sleep(1)
        fleet.prober.follow(KEY, replace(TARGET, incarnation="uid-a/1"))
        await asyncio.sleep(2.5)
        seen.append(fleet.prober.known(KEY))

    during(4.5, fleet, script)
    assert fleet.times() == [0, 1]
    assert seen == [Known()]


def test_the_same_incarnation_asked_in_another_way_is_probed_at_once_and_keeps_what_is_known() -> None:
    fleet = Fleet()
    seen: list[Known] = []

    async def script() -> None:
        fleet.prober.follow(KEY, TARGET)
        await asyncio.sleep(5)
        fleet.prober.follow(KEY, replace(TARGET, address=Address("10.0.0.1", 8000, metrics_port=9400)))
        seen.append(fleet.prober.known(KEY))

    during(6, fleet, script)
    assert fleet.asked == [(0, "http://10.0.0.1:8000/metrics"), (5, "http://10.0.0.1:9400/metrics")]
    assert seen == [KNOWN]


def test_a_worker_that_is_not_live_is_probed_when_it_is() -> None:
    fleet = Fleet()

    async def script() -> None:
        fleet.prober.follow(KEY, replace(TARGET, live=False))
        await asyncio.sleep(100)
        fleet.prober.follow(KEY, TARGET)

    during(101, fleet, script)
    assert fleet.times() == [100]


def test_a_worker_that_ceases_to_be_live_keeps_its_capacity_and_is_not_probed() -> None:
    fleet = Fleet(answers=[PAGE, REFUSED])
    seen: list[Known] = []

    async def script() -> None:
        fleet.prober.follow(KEY, TARGET)
        await asyncio.sleep(11.5)
        fleet.prober.follow(KEY, replace(TARGET, live=False))
        assert fleet.count("thunderagent_probe_workers_failing") == 0
        await asyncio.sleep(100)
        seen.append(fleet.prober.known(KEY))

    during(112, fleet, script)
    assert fleet.times() == [0, 11]
    assert seen == [KNOWN]


def test_a_shorter_interval_takes_effect_at_once() -> None:
    fleet = Fleet()

    async def script() -> None:
        fleet.prober.follow(KEY, replace(TARGET, interval_seconds=1000))
        await asyncio.sleep(5)
        fleet.prober.follow(KEY, replace(TARGET, interval_seconds=10))

    during(20, fleet, script)
    assert fleet.times() == [0, 16]


def test_following_the_same_again_changes_nothing() -> None:
    fleet = Fleet()

    async def script() -> None:
        for _ in range(5):
            fleet.prober.follow(KEY, replace(TARGET))
            await asyncio.sleep(1)

    during(10, fleet, script)
    assert fleet.times() == [0]


def test_a_forgotten_worker_is_not_probed_and_nothing_is_known_of_it() -> None:
    fleet = Fleet()
    seen: list[Known] = []

    async def script() -> None:
        fleet.prober.follow(KEY, TARGET)
        await asyncio.sleep(5)
        fleet.prober.forget(KEY)
        fleet.prober.forget(KEY)
        seen.append(fleet.prober.known(KEY))

    during(100, fleet, script)
    assert fleet.times() == [0]
    assert seen == [Known()]
    assert fleet.count("thunderagent_probe_workers") == 0


def test_a_worker_forgotten_while_it_is_probed_tells_nobody() -> None:
    fleet = Fleet(answer_seconds=2)

    async def script() -> None:
        fleet.prober.follow(KEY, TARGET)
        await asyncio.sleep(1)
        fleet.prober.forget(KEY)

    during(10, fleet, script)
    assert fleet.changes == []


def test_what_was_followed_before_the_run_is_probed() -> None:
    fleet = Fleet()

    async def main() -> None:
        fleet.prober.follow(KEY, TARGET)
        await asyncio.sleep(3)
        async with asyncio.timeout(1):
            await fleet.prober.run()

    with pytest.raises(TimeoutError):
        virtual_time.run(main())
    assert fleet.times() == [3]


def many(count: int, interval_seconds: float = 10) -> list[tuple[ProbeKey, ProbeTarget]]:
    return [
        (
            ProbeKey("llm/coder", WorkerRank(f"pod-{index}")),
            replace(TARGET, address=Address("10.0.0.1", 1024 + index), interval_seconds=interval_seconds),
        )
        for index in range(count)
    ]


def test_no_more_probes_run_at_once_than_allowed_and_the_first_come_first() -> None:
    fleet = Fleet(answer_seconds=1, concurrency=3)

    async def script() -> None:
        for key, target in many(9):
            fleet.prober.follow(key, target)

    during(3.5, fleet, script)
    assert fleet.most_running == 3
    assert fleet.asked == [(index // 3, f"http://10.0.0.1:{1024 + index}/metrics") for index in range(9)]


def test_thousands_of_workers_are_learnt_at_once_and_confirmed_evenly_and_slowly() -> None:
    fleet = Fleet(jitter=Random(1))

    async def script() -> None:
        for key, target in many(5000):
            fleet.prober.follow(key, target)
        await asyncio.sleep(1)
        assert len(fleet.asked) == 5000
        # The prober and this script: no task of a worker's own.
        assert len(asyncio.all_tasks()) == 2

    during(2000, fleet, script)
    confirmations = Counter(int(time // 100) for time in fleet.times()[5000:])
    assert all(count < 1800 for count in confirmations.values())
    assert all(confirmations[hundred] > 1200 for hundred in range(8, 20))
    assert fleet.count("thunderagent_probe_workers") == 5000


def test_confirmations_that_are_put_off_are_made_on_the_full_second() -> None:
    fleet = Fleet(jitter=Random(1))

    async def script() -> None:
        for key, target in many(1000):
            fleet.prober.follow(key, target)

    during(60, fleet, script)
    confirmed_at = [round(time, 6) for time in fleet.times()[1000:]]
    assert confirmed_at
    assert all(time == int(time) for time in confirmed_at)


def test_a_cancelled_prober_ends_the_probes_that_run() -> None:
    fleet = Fleet(answer_seconds=100)
    followed(fleet, 1)
    assert fleet.most_running == 1
    assert fleet.running == 0


def test_a_prober_that_waits_for_a_free_slot_can_be_cancelled() -> None:
    fleet = Fleet(answer_seconds=100, concurrency=1)

    async def script() -> None:
        for key, target in many(2):
            fleet.prober.follow(key, target)

    during(1, fleet, script)
    assert len(fleet.asked) == 1
    assert fleet.running == 0


def test_every_probe_is_counted_by_its_result() -> None:
    fleet = Fleet(answers=[REFUSED, NOT_YET, b"vllm:", ProbeError(ProbeResult.TIMEOUT, "no answer in time"), PAGE])
    followed(fleet, 20)
    assert {result: fleet.count("thunderagent_probes_total", result=result) for result in ProbeResult} == {
        "known": 1,
        "unknown": 1,
        "unreachable": 1,
        "timeout": 1,
        "too_large": 0,
        "unreadable": 1,
        "error": 0,
    }
    assert fleet.count("thunderagent_probe_duration_seconds_count") == 5
    assert fleet.count("thunderagent_probe_workers_failing") == 0


def test_a_failing_worker_is_counted_until_it_is_forgotten() -> None:
    fleet = Fleet(answers=[REFUSED])
    seen: list[float | None] = []

    async def script() -> None:
        fleet.prober.follow(KEY, TARGET)
        await asyncio.sleep(5)
        seen.append(fleet.count("thunderagent_probe_workers_failing"))
        fleet.prober.forget(KEY)
        seen.append(fleet.count("thunderagent_probe_workers_failing"))

    during(6, fleet, script)
    assert seen == [1, 0]


def test_a_fault_of_the_operator_ends_one_probe_not_all() -> None:
    fleet = Fleet(answers=[KeyError("bug"), PAGE])
    assert followed(fleet, 5) == KNOWN
    assert fleet.count("thunderagent_probes_total", result="error") == 1
