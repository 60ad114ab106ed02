import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Role
from thunderagent_epp.scheduling.decisions import ProgramState, State
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry.http import status_server
from thunderagent_epp.telemetry.metrics import Metrics
from thunderagent_epp.telemetry.status import Readiness, SnapshotStatus, Status, WorkerStatus, policy_parameters


class Picker:
    """What a process would hand over, for a test to set."""

    def __init__(self) -> None:
        self.status = Status()
        self.readiness = Readiness.NO_SNAPSHOT
        self.metrics = Metrics()
        self.url = ""


@pytest.fixture
async def picker() -> AsyncIterator[Picker]:
    picker = Picker()
    server = status_server(picker.metrics, lambda: picker.status, lambda: picker.readiness)
    port = await server.start("127.0.0.1", 0)
    picker.url = f"http://127.0.0.1:{port}"
    yield picker
    await server.stop()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_health_is_ok_while_the_process_answers(picker: Picker, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{picker.url}/healthz") as answer:
        assert answer.status == 200
        assert await answer.json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("readiness", "status"), [(Readiness.OK, 200), (Readiness.NO_SNAPSHOT, 503), (Readiness.DRAINING, 503)]
)
async def test_readiness_says_why_not(
    picker: Picker, client: aiohttp.ClientSession, readiness: Readiness, status: int
) -> None:
    picker.readiness = readiness
    async with client.get(f"{picker.url}/readyz") as answer:
        assert answer.status == status
        assert await answer.json() == {"ready": status == 200, "reason": str(readiness)}


async def test_metrics_are_text_and_openmetrics_for_those_who_ask(
    picker: Picker, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{picker.url}/metrics") as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "thunderagent_pauses_total 0.0" in await answer.text()
    accept = {"accept": "application/openmetrics-text;version=1.0.0"}
    async with client.get(f"{picker.url}/metrics", headers=accept) as answer:
        assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert (await answer.text()).endswith("# EOF\n")


async def test_state_before_the_first_snapshot_is_empty_and_nothing_in_it_is_made_up(
    picker: Picker, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{picker.url}/state") as answer:
        assert answer.content_type == "application/json"
        assert await answer.json() == {
            "ready": False,
            "reason": "no_snapshot",
            "policy": None,
            "snapshot": None,
            "holds": 0,
            "held_bytes": 0,
            "workers": [],
            "programs": {},
            "used": {},
            "waiting": [],
            "tracked": 0,
        }


async def test_state_shows_policy_snapshot_workers_and_programs(picker: Picker, client: aiohttp.ClientSession) -> None:
    snapshot = Snapshot(id=3, capacity=CapacitySnapshot(), admission=AdmissionPolicy(pauseThreshold=0.9))
    picker.status = Status(
        readiness=Readiness.OK,
        policy=policy_parameters(snapshot),
        snapshot=SnapshotStatus(id=3, age_seconds=1.5),
        holds=1,
        held_bytes=2048,
        workers=(
            WorkerStatus("a", 0, "10.0.0.1:8000", Role.BOTH, True, 1000, 280),
            WorkerStatus("b", 1, "[fd00::1]:8001", Role.BOTH, False, None, 0),
        ),
        state=State(
            programs={"s1": ProgramState("acting", "active", "a", 0, 180, 1, False)},
            used={"a/0": 280},
            waiting=("r2",),
            tracked=1,
        ),
    )
    async with client.get(f"{picker.url}/state") as answer:
        state = await answer.json()
    assert state["policy"] == {
        "policy": "Classic",
        "pause_threshold": 0.9,
        "pause_target": 0.8,
        "resume_hysteresis": 0.1,
        "resume_timeout_seconds": 1800.0,
        "session_retention_seconds": 1800.0,
        "scheduler_interval_seconds": 5.0,
        "acting_token_weight": 1.0,
        "acting_decay_tau_seconds": 1.0,
        "buffer_per_program": 100,
        "max_tracked_requests": 10000,
        "hold_budget": 0.3,
        "prefill_tokens_per_second": 20000.0,
        "max_hold_seconds": None,
        "session_headers": None,
        "strip_body_fields": [],
    }
    assert state["snapshot"] == {"id": 3, "age_seconds": 1.5}
    assert state["holds"] == 1
    assert state["workers"] == [
        {
            "worker": "a",
            "rank": 0,
            "endpoint": "10.0.0.1:8000",
            "role": "prefill-decode",
            "live": True,
            "capacity_tokens": 1000,
            "used_tokens": 280,
        },
        {
            "worker": "b",
            "rank": 1,
            "endpoint": "[fd00::1]:8001",
            "role": "prefill-decode",
            "live": False,
            "capacity_tokens": None,
            "used_tokens": 0,
        },
    ]
    assert state["programs"] == {
        "s1": {
            "status": "acting",
            "lifecycle": "active",
            "worker": "a",
            "rank": 0,
            "tokens": 180,
            "steps": 1,
            "marked": False,
        }
    }
    assert state["used"] == {"a/0": 280}
    assert state["waiting"] == ["r2"]
    assert state["tracked"] == 1


async def test_state_with_ten_thousand_programs_comes_whole(picker: Picker, client: aiohttp.ClientSession) -> None:
    programs = {f"s{i:05}": ProgramState("acting", "active", "a", 0, i, 1, False) for i in range(10_000)}
    picker.status = Status(state=State(programs=programs, used={}, waiting=(), tracked=0))
    async with client.get(f"{picker.url}/state") as answer:
        state = await answer.json()
    assert len(state["programs"]) == 10_000
    assert state["programs"]["s09999"]["tokens"] == 9999


async def test_the_first_page_lists_the_others(picker: Picker, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{picker.url}/") as answer:
        text = await answer.text()
    assert text.startswith("ThunderAgent endpoint picker ")
    assert "\n/state " in text


async def test_an_unknown_page_and_a_wrong_method_are_answered_in_json(
    picker: Picker, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{picker.url}/states") as answer:
        assert answer.status == 404
        assert await answer.json() == {
            "error": "Not Found: /states",
            "pages": ["/healthz", "/metrics", "/readyz", "/state"],
        }
    async with client.post(f"{picker.url}/state") as answer:
        assert answer.status == 405
        assert answer.headers["allow"] == "GET,HEAD"
        assert (await answer.json())["error"] == "Method Not Allowed: /state"


async def test_a_page_that_fails_says_so_and_the_others_go_on(picker: Picker, client: aiohttp.ClientSession) -> None:
    picker.status = Status(policy={"broken": object()})
    async with client.get(f"{picker.url}/state") as answer:
        assert answer.status == 500
        assert await answer.json() == {"error": "Internal Server Error: /state"}
    async with client.get(f"{picker.url}/healthz") as answer:
        assert answer.status == 200


async def test_without_a_host_every_interface_listens_on_one_port(client: aiohttp.ClientSession) -> None:
    server = status_server(Metrics(), Status, lambda: Readiness.OK)
    port = await server.start("", 0)
    try:
        async with client.get(f"http://127.0.0.1:{port}/readyz") as answer:
            assert answer.status == 200
    finally:
        await server.stop()


async def test_a_port_that_is_taken_is_an_error_and_stopping_is_safe_after_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = status_server(Metrics(), Status, lambda: Readiness.OK)
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"^cannot listen on 127.0.0.1:{port}: Address already in use$"):
            await server.start("127.0.0.1", port)
        await server.stop()


async def test_stopping_closes_the_port_though_a_scraper_keeps_its_connection() -> None:
    server = status_server(Metrics(), Status, lambda: Readiness.OK)
    port = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as scraper:
        async with scraper.get(f"http://127.0.0.1:{port}/metrics") as answer:
            await answer.read()
        await server.stop()
        with pytest.raises(aiohttp.ClientError):
            await scraper.get(f"http://127.0.0.1:{port}/metrics")
