"""``thunderagent epp --conformance`` behind a real Envoy, as the conformance suite of the extension would use it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import aiohttp
import pytest

from support.echo_worker import EchoWorker, running_echo_worker
from support.picker_process import failing_picker, running_picker_process

if TYPE_CHECKING:
    from conftest import StartEnvoy

SELECTION = "test-epp-endpoint-selection"
SERVED = "x-conformance-test-served-endpoint"
SELECTED = "x-conformance-test-selected-endpoint"


@pytest.fixture
async def pods() -> AsyncIterator[list[EchoWorker]]:
    async with running_echo_worker() as first, running_echo_worker() as second:
        yield [first, second]


async def test_each_pod_serves_what_selects_it_and_the_answer_says_so(
    start_envoy: StartEnvoy, pods: list[EchoWorker]
) -> None:
    async with running_picker_process(None, "--conformance") as picker, aiohttp.ClientSession() as client:
        envoy = await start_envoy(picker.grpc_port)
        for pod in pods:
            async with client.post(f"{envoy.url}/primary", data=b"hi", headers={SELECTION: pod.endpoint}) as answer:
                assert (answer.status, await answer.read()) == (200, b"hi")
                assert answer.headers.getall(SERVED) == [pod.endpoint]
                assert answer.headers.getall(SELECTED) == [pod.endpoint]
        async with client.get(envoy.url, headers={SELECTION: ",".join(pod.endpoint for pod in pods)}) as answer:
            assert answer.headers[SERVED] in {pod.endpoint for pod in pods}
        async with client.get(envoy.url) as answer:
            assert (answer.status, answer.headers["x-thunderagent-refusal"]) == (503, "no_endpoints")
        assert await picker.logged("conformance mode: clients choose the endpoints; not for real traffic")
        assert (await picker.metrics()).value("requests_total", path="other", outcome="completed") == 3
    assert [len(pod.received) for pod in pods] in ([2, 1], [1, 2])


async def test_a_pool_serves_requests_that_select_nothing_and_no_pod_of_another(
    start_envoy: StartEnvoy, pods: list[EchoWorker]
) -> None:
    own, other = pods
    async with (
        running_picker_process(None, "--conformance", "--conformance-endpoint", own.endpoint) as picker,
        aiohttp.ClientSession() as client,
    ):
        assert await picker.logged("conformance pool", endpoints=[own.endpoint])
        envoy = await start_envoy(picker.grpc_port)
        async with client.get(envoy.url) as answer:
            assert answer.headers[SERVED] == own.endpoint
        async with client.get(envoy.url, headers={SELECTION: f"{other.endpoint},{own.endpoint}"}) as answer:
            assert answer.headers[SERVED] == own.endpoint
        async with client.get(envoy.url, headers={SELECTION: other.endpoint}) as answer:
            assert answer.status == 503
    assert other.received == []


async def test_it_goes_with_no_policy_and_its_pool_only_with_it() -> None:
    alone = "thunderagent: --conformance: goes with no policy; leave out --policy-file, --feed and what belongs to them"
    assert await failing_picker("--conformance", "--policy-file", "p.yaml") == (2, [alone])
    assert await failing_picker("--conformance", "--feed", "operator:9443", "--policy", "a/b") == (2, [alone])
    assert await failing_picker("--policy-file", "p.yaml", "--conformance-endpoint", "10.0.0.1:80") == (
        2,
        ["thunderagent: --conformance-endpoint: goes with --conformance only"],
    )
    assert await failing_picker("--conformance", "--conformance-endpoint", "10.0.0.1:0") == (
        2,
        ["thunderagent: --conformance-endpoint: port must be 1 to 65535"],
    )
