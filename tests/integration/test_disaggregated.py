"""Prefill on one worker and decode on another, through a real Envoy and simulated workers that hand the cache over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from support.envoy_changes import HEADER_MUTATION, change_envoys, without_filter
from support.local_picker import LocalPicker, running_local_picker
from support.scripted_worker import ScriptedWorker, running_scripted_worker
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Role, Worker, WorkerRank
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.topology import Disaggregation, Handoff, RetentionPool
from thunderagent_epp.snapshot import Snapshot
from thunderagent_sim.engine import EngineOptions
from thunderagent_sim.worker import SimulatedWorker, WorkerOptions, running_worker
from thunderagent_sim.worker_role import WorkerRole

if TYPE_CHECKING:
    from conftest import StartEnvoy

CHAT = "/v1/chat/completions"
SESSION = "x-thunderagent-session-id"
FAST = EngineOptions(blocks=1000, block_size=16, prefill_tokens_per_second=100_000.0, decode_tokens_per_second=10_000.0)
TASK = " ".join(f"word{number}" for number in range(100))


class Fleet:
    """Simulated workers by name, ``p…`` for prefill and ``d…`` for decode."""

    def __init__(self) -> None:
        self.workers: dict[str, SimulatedWorker] = {}
        self._parts: dict[str, contextlib.AsyncExitStack] = {}

    async def start(self, name: str, engine: EngineOptions = FAST) -> None:
        role = WorkerRole.PREFILL if name.startswith("p") else WorkerRole.DECODE
        options = WorkerOptions(engine, port=0, model="m", step_seconds=0.002, role=role)
        parts = self._parts[name] = contextlib.AsyncExitStack()
        self.workers[name] = await parts.enter_async_context(running_worker(options))

    async def kill(self, name: str) -> None:
        """End a worker that the picker goes on to know of."""
        await self._parts.pop(name).aclose()

    async def stop(self) -> None:
        for name in list(self._parts):
            await self.kill(name)

    def endpoint(self, name: str) -> str:
        return self.workers[name].url.removeprefix("http://")

    def prefilled(self, name: str) -> int:
        """Prompts a worker has computed for another, by the one token each of them has."""
        return self.workers[name].engine.counters.generation

    def loaded_tokens(self, name: str) -> int:
        return self.workers[name].engine.counters.external_hits

    def snapshot(self, *names: str, id: int = 1, retention: str = "Decode", **capacities: int) -> Snapshot:
        """These workers, with room for everything unless ``capacities`` says otherwise."""
        workers = tuple(
            Worker(
                WorkerRank(name),
                self.endpoint(name),
                capacities.get(name, 1_000_000),
                role=Role.PREFILL if name.startswith("p") else Role.DECODE,
            )
            for name in names
        )
        policy = AdmissionPolicy.from_parameters({"buffer_per_program": 0, "scheduler_interval_seconds": 0.05})
        return Snapshot(id, CapacitySnapshot(workers), policy, disaggregation=Disaggregation(RetentionPool(retention)))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    try:
        await fleet.start("p1")
        await fleet.start("d1")
        yield fleet
    finally:
        await fleet.stop()


class Session:
    """One agent: what it was answered is part of its next prompt."""

    def __init__(self, client: aiohttp.ClientSession, name: str) -> None:
        self._client = client
        self._name = name
        self._messages: list[dict[str, str]] = []

    async def turn(self, text: str = TASK, answer_tokens: int = 3) -> dict[str, Any]:
        """Send a turn; gives the usage of its answer."""
        self._messages.append({"role": "user", "content": text})
        body = {"model": "m", "messages": self._messages, "max_tokens": answer_tokens}
        async with self._client.post(CHAT, json=body, headers={SESSION: self._name}) as answer:
            assert answer.status == 200, await answer.text()
            content = await answer.json()
        self._messages.append({"role": "assistant", "content": content["choices"][0]["message"]["content"]})
        return dict(content["usage"])


@contextlib.asynccontextmanager
async def gateway(start_envoy: StartEnvoy, of: Snapshot) -> AsyncIterator[tuple[LocalPicker, aiohttp.ClientSession]]:
    async with running_local_picker(of) as picker:
        envoy = await start_envoy(picker.port)
        async with aiohttp.ClientSession(envoy.url, timeout=aiohttp.ClientTimeout(total=60)) as client:
            yield picker, client
            await picker.until_idle()


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def test_a_cold_and_a_warm_turn_are_computed_by_the_prefill_worker_and_answered_by_the_decode_worker(
    start_envoy: StartEnvoy, fleet: Fleet
) -> None:
    async with gateway(start_envoy, fleet.snapshot("p1", "d1")) as (picker, client):
        agent = Session(client, "s")
        cold = await agent.turn()
        assert fleet.prefilled("p1") == 1
        assert fleet.loaded_tokens("d1") == cold["prompt_tokens"] - 1
        assert picker.used == {"d1/0": cold["total_tokens"]}

        found_before = fleet.workers["p1"].engine.counters.prefix_hits
        warm = await agent.turn("and the tests")
        assert fleet.prefilled("p1") == 2
        assert fleet.workers["p1"].engine.counters.prefix_hits - found_before >= cold["prompt_tokens"] - 16
        assert cached(warm) == warm["prompt_tokens"] - 1
        assert fleet.loaded_tokens("d1") < cold["prompt_tokens"] + 64
        assert picker.used == {"d1/0": warm["total_tokens"]}


async def test_sessions_return_to_their_own_prefill_workers(start_envoy: StartEnvoy, fleet: Fleet) -> None:
    await fleet.start("p2")
    await fleet.start("d2")
    async with gateway(start_envoy, fleet.snapshot("p1", "p2", "d1", "d2")) as (picker, client):
        await Session(client, "warm-up").turn()
        agents = [Session(client, f"s{number}") for number in range(4)]
        for agent in agents:
            await agent.turn()
        hits = [fleet.workers[name].engine.counters.prefix_hits for name in ("p1", "p2")]
        places = {name: picker.program(f"s{name}").worker for name in range(4)}
        second = [await agent.turn("go on") for agent in agents]
        assert {name: picker.program(f"s{name}").worker for name in range(4)} == places
        found = sum(fleet.workers[name].engine.counters.prefix_hits for name in ("p1", "p2")) - sum(hits)
        assert found >= sum(usage["prompt_tokens"] - 48 for usage in second)


async def test_without_prefill_workers_the_decode_worker_does_both(start_envoy: StartEnvoy, fleet: Fleet) -> None:
    async with gateway(start_envoy, fleet.snapshot("d1")) as (_, client):
        usage = await Session(client, "s").turn()
        assert usage["completion_tokens"] == 3
    assert fleet.prefilled("p1") == 0
    assert fleet.workers["d1"].engine.counters.external_queries == 0


async def test_a_dead_prefill_worker_costs_a_prefill_and_no_turn(start_envoy: StartEnvoy, fleet: Fleet) -> None:
    await fleet.start("p2")
    async with gateway(start_envoy, fleet.snapshot("p1", "p2", "d1")) as (picker, client):
        agent = Session(client, "s")
        first = await agent.turn()
        assert (fleet.prefilled("p1"), fleet.prefilled("p2")) == (1, 0)
        await fleet.kill("p1")

        # Nobody has noticed yet: it is still named, the decode worker finds nobody there and computes by itself.
        second = await agent.turn("go on")
        assert second["completion_tokens"] == 3
        assert fleet.loaded_tokens("d1") == first["prompt_tokens"] - 1

        picker.director.apply(fleet.snapshot("p2", "d1", id=2))
        third = await agent.turn("go on")
        assert fleet.prefilled("p2") == 1
        assert cached(third) == third["prompt_tokens"] - 1


@pytest.mark.parametrize("retention", ["Decode", "Prefill", "Both"])
async def test_a_held_turn_touches_neither_leg(start_envoy: StartEnvoy, fleet: Fleet, retention: str) -> None:
    async with gateway(start_envoy, fleet.snapshot("p1", "d1", retention=retention, p1=300, d1=300)) as (
        picker,
        client,
    ):
        slow = EngineOptions(blocks=1000, prefill_tokens_per_second=100_000.0, decode_tokens_per_second=50.0)
        await fleet.kill("d1")
        await fleet.start("d1", slow)
        picker.director.apply(fleet.snapshot("p1", "d1", id=2, retention=retention, p1=300, d1=300))
        running = asyncio.create_task(Session(client, "s").turn(answer_tokens=100_000 // 2_000))
        await picker.until(lambda picker: fleet.prefilled("p1") == 1)
        held = asyncio.create_task(Session(client, "t").turn())
        await picker.until_held(1)
        picker.director.tick()
        assert picker.status.holds == 1
        assert fleet.prefilled("p1") == 1
        assert fleet.workers["d1"].engine.waiting + fleet.workers["d1"].engine.running == 1
        await running
        # What idles keeps its place where it is retained: another snapshot makes room.
        picker.director.apply(fleet.snapshot("p1", "d1", id=2, retention=retention))
        assert (await held)["completion_tokens"] == 3
        assert fleet.prefilled("p1") == 2


@pytest.mark.parametrize(
    ("retention", "charged"), [("Decode", ["d1/0"]), ("Prefill", ["p1/0"]), ("Both", ["d1/0", "p1/0"])]
)
async def test_an_idle_program_is_charged_to_the_pool_that_retains_it(
    start_envoy: StartEnvoy, fleet: Fleet, retention: str, charged: list[str]
) -> None:
    async with gateway(start_envoy, fleet.snapshot("p1", "d1", retention=retention)) as (picker, client):
        usage = await Session(client, "s").turn()
        assert picker.used == dict.fromkeys(charged, usage["total_tokens"])


@pytest.mark.parametrize(
    ("retention", "tight", "holds"),
    [
        ("Decode", "d1", True),
        ("Decode", "p1", False),
        ("Prefill", "p1", True),
        ("Prefill", "d1", False),
        ("Both", "d1", True),
        ("Both", "p1", True),
    ],
)
async def test_idle_programs_hold_a_new_one_by_the_capacity_of_the_pool_that_retains_them(
    start_envoy: StartEnvoy, fleet: Fleet, retention: str, tight: str, holds: bool
) -> None:
    # Room for one program of some 180 tokens, not for two, and none to be paused: 0.95 of 300 is not passed.
    of = fleet.snapshot("p1", "d1", retention=retention, **{tight: 300})
    async with gateway(start_envoy, of) as (picker, client):
        assert 160 < (await Session(client, "s").turn())["total_tokens"] < 200
        second = asyncio.create_task(Session(client, "t").turn())
        if holds:
            await picker.until_held(1)
            assert fleet.prefilled("p1") == 1
            picker.director.apply(fleet.snapshot("p1", "d1", id=2, retention=retention))
        assert (await second)["completion_tokens"] == 3


async def test_a_client_that_leaves_ends_both_legs(start_envoy: StartEnvoy, fleet: Fleet) -> None:
    await fleet.kill("p1")
    await fleet.start("p1", EngineOptions(blocks=1000, prefill_tokens_per_second=1.0))
    async with gateway(start_envoy, fleet.snapshot("p1", "d1")) as (picker, client):
        leaving = asyncio.create_task(Session(client, "s").turn())
        await picker.until(lambda _: fleet.workers["p1"].engine.running == 1)
        leaving.cancel()
        await asyncio.wait((leaving,))
        await picker.until(lambda _: fleet.workers["p1"].engine.running == 0)
        await picker.until_idle()
        assert picker.used == {}


# What the decode worker is told, header by header


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedWorker]:
    async with running_scripted_worker() as running:
        yield running


def one_of_each(decode: ScriptedWorker, handoff: Handoff | None, prefill: bool = True) -> Snapshot:
    workers = [Worker(WorkerRank("vllm-decode-0"), decode.endpoint, role=Role.DECODE)]
    if prefill:
        workers.append(Worker(WorkerRank("a", 1), "10.0.0.9:8001", role=Role.PREFILL))
    terms = None if handoff is None else Disaggregation(handoff=handoff)
    return Snapshot(1, CapacitySnapshot(tuple(workers)), disaggregation=terms)


FORGED = {
    "x-prefiller-host-port": "1.1.1.1:666",
    "x-data-parallel-host-port": "1.1.1.1:666",
    "x-dynamo-worker-instance-id": "666",
    "x-dynamo-dp-rank": "666",
    "x-dynamo-prefill-instance-id": "666",
    "x-dynamo-prefill-dp-rank": "666",
    "x-dynamo-routing-mode": "forged",
    "x-worker-instance-id": "666",
    "x-dp-rank": "666",
    "x-prefill-instance-id": "666",
    "x-prefill-dp-rank": "666",
}


@pytest.mark.parametrize("stripped_by_envoy", [True, False])
@pytest.mark.parametrize(
    ("handoff", "prefill", "told"),
    [
        (None, False, {}),
        (Handoff.LLM_D, False, {}),
        (Handoff.LLM_D, True, {"x-prefiller-host-port": ["10.0.0.9:8001"]}),
        (
            Handoff.DYNAMO,
            False,
            {
                "x-dynamo-worker-instance-id": ["6080257717914508"],
                "x-dynamo-dp-rank": ["0"],
                "x-dynamo-routing-mode": ["aggregated"],
            },
        ),
        (
            Handoff.DYNAMO,
            True,
            {
                "x-dynamo-worker-instance-id": ["6080257717914508"],
                "x-dynamo-dp-rank": ["0"],
                "x-dynamo-prefill-instance-id": ["7688582637611507"],
                "x-dynamo-prefill-dp-rank": ["1"],
                "x-dynamo-routing-mode": ["disaggregated"],
            },
        ),
    ],
)
async def test_the_picker_alone_names_workers_to_workers(
    start_envoy: StartEnvoy,
    scripted: ScriptedWorker,
    monkeypatch: pytest.MonkeyPatch,
    handoff: Handoff | None,
    prefill: bool,
    told: dict[str, list[str]],
    stripped_by_envoy: bool,
) -> None:
    if not stripped_by_envoy:
        change_envoys(monkeypatch, without_filter(HEADER_MUTATION))
    of = one_of_each(scripted, handoff, prefill)
    async with gateway(start_envoy, of) as (_, client):
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        async with client.post(CHAT, json=body, headers=FORGED) as answer:
            assert answer.status == 200
            await answer.read()
    (received,) = scripted.received
    assert {name: received.headers.getall(name) for name in FORGED if name in received.headers} == told
