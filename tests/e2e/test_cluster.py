"""Through the whole: a Kubernetes API, the operator, a picker, Envoy, and simulated workers announced as pods.

Each worker listens at a loopback address of its own, as a pod does at its IP, all on one port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import aiohttp
import pytest

from support.kube_api import ADMIN, KubeApi
from support.kube_client import Namespace
from support.operator_process import OperatorProcess, running_operator
from support.picker_process import PickerProcess, running_following_picker
from thunderagent_epp.envoy_config import EnvoyOptions
from thunderagent_sim.engine import EngineOptions
from thunderagent_sim.envoy_process import RunningEnvoy, running_envoy
from thunderagent_sim.worker import SimulatedWorker, WorkerOptions, running_worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

CAPACITY_TOKENS = 16_000


class Pods:
    """Workers that run, each announced as a pod of the namespace."""

    def __init__(self, namespace: Namespace, stack: AsyncExitStack) -> None:
        self.namespace = namespace
        self.port = _port_free_at_every_address()
        self.workers: dict[str, SimulatedWorker] = {}
        self._stack = stack
        self._addresses = count(2)

    @property
    def policy(self) -> str:
        return f"{self.namespace.name}/coder"

    @property
    def selected(self) -> dict[str, Any]:
        """The ``workers`` of a policy for these pods."""
        return {
            "selector": {"matchLabels": {"app": "vllm"}},
            "targetPorts": [self.port],
            "engine": "vllm",
            "probeInterval": "1s",
        }

    async def start(self, name: str, startup_delay_seconds: float = 0) -> None:
        """Run a worker of 16,000 tokens and announce its pod as ready."""
        options = WorkerOptions(
            engine=EngineOptions(blocks=1000, prefill_tokens_per_second=1e6, decode_tokens_per_second=1e4),
            host=f"127.0.0.{next(self._addresses)}",
            port=self.port,
            startup_delay_seconds=startup_delay_seconds,
        )
        self.workers[name] = await self._stack.enter_async_context(running_worker(options))
        await self.namespace.create_pod(name, options.host, port=self.port)

    def served(self, name: str) -> int:
        """Requests that a worker has answered."""
        return sum(self.workers[name].engine.counters.finished_requests.values())


class Clients:
    """Agents that send chat requests through the gateway."""

    def __init__(self, gateway: str, client: aiohttp.ClientSession) -> None:
        self._url = f"{gateway}/v1/chat/completions"
        self._client = client
        self._sessions = count()

    async def ask(self, session: str, header: str = "x-thunderagent-session-id", **headers: str) -> int:
        """One short turn of a session; its HTTP status."""
        body = {"model": "simulated", "max_tokens": 2, "messages": [{"role": "user", "content": "how are you"}]}
        headers = {header: session, **headers}
        async with self._client.post(self._url, json=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    @contextlib.asynccontextmanager
    async def at_work(self, agents: int = 4) -> AsyncIterator[list[int]]:
        """Sessions of one turn each, one after another for the length of the block; gives their statuses so far."""
        statuses: list[int] = []

        async def work() -> None:
            while True:
                final = {"x-thunderagent-session-final": "true"}
                statuses.append(await self.ask(f"agent-{next(self._sessions)}", **final))

        async with asyncio.TaskGroup() as group:
            working = [group.create_task(work()) for _ in range(agents)]
            yield statuses
            for task in working:
                task.cancel()


@contextlib.asynccontextmanager
async def running_pods(namespace: Namespace) -> AsyncIterator[Pods]:
    async with AsyncExitStack() as stack:
        yield Pods(namespace, stack)


@contextlib.asynccontextmanager
async def running_gateway(picker: PickerProcess) -> AsyncIterator[Clients]:
    """An Envoy before the picker, and clients before that."""
    options = EnvoyOptions(picker_port=picker.grpc_port, listen_address="127.0.0.1", listen_port=0, tls=False)
    async with running_envoy(options) as envoy, aiohttp.ClientSession() as session:
        yield Clients(_url(envoy), session)


def _url(envoy: RunningEnvoy) -> str:
    return envoy.url


def _port_free_at_every_address() -> int:
    with socket.socket() as bound:
        bound.bind(("0.0.0.0", 0))
        port = bound.getsockname()[1]
        assert isinstance(port, int)
        return port


async def until(reached: Callable[[], bool]) -> None:
    """Wait for what happens in this process."""
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110 - no event of its own
            await asyncio.sleep(0.005)


async def test_a_request_reaches_a_worker_whose_capacity_is_learnt_when_it_has_started(
    operator: OperatorProcess, namespace: Namespace
) -> None:
    async with running_pods(namespace) as pods:
        await namespace.create_policy(workers=pods.selected)
        await pods.start("slow", startup_delay_seconds=4)
        unknown = await namespace.until_policy(lambda policy: policy.workers == "1/1")
        assert unknown.condition("CapacityKnown") == ("False", "CapacityUnknown")
        assert "slow/0" in unknown.message("CapacityKnown")
        async with (
            running_following_picker(operator.feed, pods.policy) as picker,
            running_gateway(picker) as clients,
        ):
            await picker.until_ready()
            known = await namespace.until_policy(
                lambda policy: policy.condition("CapacityKnown") == ("True", "CapacityKnown")
            )
            assert known.status["capacityTokens"] == CAPACITY_TOKENS
            await picker.until(lambda state: state["workers"][0]["capacity_tokens"] == CAPACITY_TOKENS)
            assert await clients.ask("agent") == 200
            assert pods.served("slow") == 1


async def test_a_pod_that_is_not_ready_gets_no_new_request(operator: OperatorProcess, namespace: Namespace) -> None:
    async with running_pods(namespace) as pods:
        await namespace.create_policy(workers=pods.selected)
        await pods.start("a")
        await pods.start("b")
        async with (
            running_following_picker(operator.feed, pods.policy) as picker,
            running_gateway(picker) as clients,
        ):
            await picker.until(lambda state: [w["capacity_tokens"] for w in state["workers"]] == [CAPACITY_TOKENS] * 2)
            async with clients.at_work() as statuses:
                await until(lambda: pods.served("a") > 20 and pods.served("b") > 20)
                changed = time.monotonic()
                await namespace.set_ready("a", False)
                last = await last_served(pods, "a", after=changed)
                print(f"after a pod turned not Ready its last request ended {last:.2f} s later")
                before = pods.served("a")
                await until_served(pods, "b", 20)
                assert pods.served("a") == before
                await namespace.set_ready("a", True)
                await until_served(pods, "a", 20)
            assert set(statuses) == {200}


async def last_served(pods: Pods, name: str, after: float) -> float:
    """Wait until a worker has got nothing while others got 100 requests; when its last one ended."""
    others = [other for other in pods.workers if other != name]
    last, served, passed = 0.0, -1, 0
    async with asyncio.timeout(30):
        while (meanwhile := sum(map(pods.served, others)) - passed) < 100:
            if pods.served(name) != served:
                last, served, passed = time.monotonic() - after, pods.served(name), meanwhile + passed
            await asyncio.sleep(0.002)
    return last


async def until_served(pods: Pods, name: str, more: int) -> None:
    wanted = pods.served(name) + more
    await until(lambda: pods.served(name) >= wanted)


async def test_a_restarted_container_frees_its_programs(operator: OperatorProcess, namespace: Namespace) -> None:
    async with running_pods(namespace) as pods:
        await namespace.create_policy(workers=pods.selected, admission={"schedulerInterval": "200ms"})
        await pods.start("a")
        async with (
            running_following_picker(operator.feed, pods.policy) as picker,
            running_gateway(picker) as clients,
        ):
            await picker.until(lambda state: [w["capacity_tokens"] for w in state["workers"]] == [CAPACITY_TOKENS])
            assert await clients.ask("agent") == 200
            state = await picker.until(lambda state: state["workers"][0]["used_tokens"] > 0)
            assert program(state, "agent")["worker"] == "a"
            await namespace.restart_container("a")
            state = await picker.until(lambda state: state["workers"][0]["used_tokens"] == 0)
            assert program(state, "agent").get("worker") is None
            assert await clients.ask("agent") == 200
            assert program(await picker.state(), "agent")["worker"] == "a"


def program(state: dict[str, Any], session: str) -> dict[str, Any]:
    found = state["programs"][session]
    assert isinstance(found, dict)
    return found


async def test_an_edit_of_the_policy_takes_effect_without_a_restart(
    operator: OperatorProcess, namespace: Namespace
) -> None:
    async with running_pods(namespace) as pods:
        await namespace.create_policy(workers=pods.selected)
        await pods.start("a")
        async with (
            running_following_picker(operator.feed, pods.policy) as picker,
            running_gateway(picker) as clients,
        ):
            await picker.until(lambda state: [w["capacity_tokens"] for w in state["workers"]] == [CAPACITY_TOKENS])
            assert await clients.ask("before", header="x-my-agent") == 200
            await namespace.patch_policy(requests={"sessionHeaders": ["x-my-agent"]})
            await picker.until(lambda state: state["policy"]["session_headers"] == ["x-my-agent"])
            assert await clients.ask("after", header="x-my-agent") == 200
            programs = (await picker.state())["programs"]
            assert "after" in programs
            assert "before" not in programs
            await namespace.until_policy(lambda policy: policy.programmed and policy.status["observedGeneration"] == 2)


async def test_traffic_goes_on_without_the_operator_and_pickers_are_fed_when_it_is_back(
    kube_api: KubeApi, namespace: Namespace
) -> None:
    options = ("--namespace", namespace.name, "--lease-namespace", namespace.name)
    async with running_pods(namespace) as pods, AsyncExitStack() as stack:

        async def start_operator(feed_port: int = 0) -> OperatorProcess:
            running = running_operator(kube_api.kubeconfig(ADMIN), *options, feed_port=feed_port)
            return await stack.enter_async_context(running)

        async def start_picker(feed: str) -> PickerProcess:
            return await stack.enter_async_context(running_following_picker(feed, pods.policy))

        await namespace.create_policy(workers=pods.selected)
        await pods.start("a")
        operator = await start_operator()
        await operator.until_serving()
        picker = await start_picker(operator.feed)
        clients = await stack.enter_async_context(running_gateway(picker))
        await picker.until(lambda state: [w["capacity_tokens"] for w in state["workers"]] == [CAPACITY_TOKENS])

        async with clients.at_work() as statuses:
            await until_served(pods, "a", 20)
            await operator.kill()
            await picker.logged("operator cannot be followed")
            await until_served(pods, "a", 100)
            assert (await picker.get("/readyz"))[0] == 200
        assert set(statuses) == {200}

        await picker.kill()
        picker = await start_picker(operator.feed)
        await picker.until_unready("no_snapshot")
        started = time.monotonic()
        operator = await start_operator(operator.feed_port)
        await operator.until_serving()
        answered = time.monotonic()
        await picker.until_ready()
        ready = time.monotonic()
        print(f"an operator that is started feeds after {answered - started:.1f} s; ", end="")
        print(f"a picker that waited for it is ready {ready - answered:.2f} s later")
        state = await picker.state()
        assert [w["capacity_tokens"] for w in state["workers"]] == [CAPACITY_TOKENS], "learnt before it is told"

        await picker.kill()
        picker = await start_picker(operator.feed)
        listening = time.monotonic()
        await picker.until_ready()
        print(f"a picker that is restarted is ready {time.monotonic() - listening:.2f} s after it listens")
        clients = await stack.enter_async_context(running_gateway(picker))
        assert await clients.ask("agent") == 200
