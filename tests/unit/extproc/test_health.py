from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from thunderagent_epp.extproc.health import Health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

READINESS = ["", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor"]


@dataclass
class Ports:
    health: Health
    picker: grpc.aio.Channel
    probes: grpc.aio.Channel


@pytest.fixture
async def ports() -> AsyncIterator[Ports]:
    """One health service on two servers, as the picker has it."""
    health = Health()
    await health.set_ready(False)
    picker, probes = grpc.aio.server(), grpc.aio.server()
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(
        external_processor_pb2_grpc.ExternalProcessorServicer(), picker
    )
    health.add_to(picker, "envoy.service.ext_proc.v3.ExternalProcessor")
    health.add_to(probes)
    numbers = [server.add_insecure_port("127.0.0.1:0") for server in (picker, probes)]
    await picker.start()
    await probes.start()
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{number}") for number in numbers]
    yield Ports(health, *channels)
    for channel in channels:
        await channel.close()
    await picker.stop(None)
    await probes.stop(None)


async def status(channel: grpc.aio.Channel, name: str) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return int(answer.status)


@pytest.mark.parametrize("name", READINESS)
async def test_readiness_waits_for_a_snapshot_and_ends_with_a_drain_on_both_ports(ports: Ports, name: str) -> None:
    assert [await status(ports.picker, name), await status(ports.probes, name)] == [NOT_SERVING, NOT_SERVING]
    await ports.health.set_ready(True)
    assert [await status(ports.picker, name), await status(ports.probes, name)] == [SERVING, SERVING]
    await ports.health.set_ready(False)
    assert [await status(ports.picker, name), await status(ports.probes, name)] == [NOT_SERVING, NOT_SERVING]


async def test_liveness_does_not_depend_on_readiness(ports: Ports) -> None:
    assert await status(ports.probes, "liveness") == SERVING
    await ports.health.set_ready(True)
    await ports.health.set_ready(False)
    assert await status(ports.probes, "liveness") == SERVING


async def test_an_unknown_name_is_not_found(ports: Ports) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await status(ports.probes, "no.such.Service")
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_sees_readiness_come_and_go(ports: Ports) -> None:
    watch = health_pb2_grpc.HealthStub(ports.probes).Watch(health_pb2.HealthCheckRequest(service="readiness"))
    seen = [(await watch.read()).status]
    await ports.health.set_ready(True)
    seen.append((await watch.read()).status)
    await ports.health.set_ready(False)
    seen.append((await watch.read()).status)
    watch.cancel()
    assert seen == [NOT_SERVING, SERVING, NOT_SERVING]


async def test_a_watcher_of_an_unknown_name_is_told_so_and_kept(ports: Ports) -> None:
    watch = health_pb2_grpc.HealthStub(ports.probes).Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
    assert (await watch.read()).status == SERVICE_UNKNOWN
    assert not watch.done()
    watch.cancel()


async def test_list_tells_every_name_at_once(ports: Ports) -> None:
    await ports.health.set_ready(True)
    answer = await health_pb2_grpc.HealthStub(ports.picker).List(health_pb2.HealthListRequest())
    assert {name: each.status for name, each in answer.statuses.items()} == {
        "": SERVING,
        "readiness": SERVING,
        "inference-extension": SERVING,
        "envoy.service.ext_proc.v3.ExternalProcessor": SERVING,
        "liveness": SERVING,
    }


async def test_a_server_added_later_does_not_forget_readiness(ports: Ports) -> None:
    await ports.health.set_ready(True)
    ports.health.add_to(grpc.aio.server())
    assert await status(ports.picker, "readiness") == SERVING


async def test_reflection_names_the_services_of_each_port(ports: Ports) -> None:
    async def services(channel: grpc.aio.Channel) -> set[str]:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        return {service.name for service in answer.list_services_response.service}

    assert await services(ports.picker) == {
        "envoy.service.ext_proc.v3.ExternalProcessor",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert await services(ports.probes) == {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_many_askers_at_once_are_all_answered(ports: Ports) -> None:
    assert await asyncio.gather(*(status(ports.probes, "liveness") for _ in range(50))) == [SERVING] * 50
