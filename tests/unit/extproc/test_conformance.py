"""The conformance fixture: it sends requests where they say, and reports who served them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from proxy_messages import h, metadata

from thunderagent_epp.extproc.conformance import ConformancePicker, report
from thunderagent_epp.extproc.errors import Refusal, Refused
from thunderagent_epp.extproc.subset import Subset
from thunderagent_epp.requests.headers import Headers
from thunderagent_epp.requests.inference import InferenceRequest
from thunderagent_epp.telemetry.metrics import Metrics

SERVED = "x-gateway-destination-endpoint-served"


@pytest.fixture
def picker() -> ConformancePicker:
    return ConformancePicker(Metrics())


def chosen(picker: ConformancePicker, *selections: str, hint: list[str] | None = None, times: int = 1) -> list[str]:
    headers = Headers(("test-epp-endpoint-selection", selection) for selection in selections)
    request = InferenceRequest("/", False, headers=headers)
    subset = None if hint is None else Subset.of(hint)
    return [picker.admit(request, subset=subset, body_bytes=0).placement.endpoint for _ in range(times)]


@contextlib.asynccontextmanager
async def pool_of(*endpoints: tuple[str, int]) -> AsyncIterator[ConformancePicker]:
    picker = ConformancePicker(Metrics(), endpoints)
    running = asyncio.create_task(picker.run())
    try:
        async with asyncio.timeout(10):
            while not picker._pool:  # noqa: ASYNC110 - what is waited for has no event of its own
                await asyncio.sleep(0)
        yield picker
    finally:
        running.cancel()
        await asyncio.wait((running,))


@pytest.mark.parametrize(
    ("selection", "endpoints"),
    [
        ("10.0.0.1:8000", ["10.0.0.1:8000"] * 3),
        ("10.0.0.1", ["10.0.0.1:3000"] * 3),
        ("10.0.0.1, 10.0.0.2:3002", ["10.0.0.1:3000", "10.0.0.2:3002", "10.0.0.1:3000"]),
        ("10.0.0.1,10.0.0.1", ["10.0.0.1:3000"] * 3),
        ("[fd00::1]:3002,fd00::2", ["[fd00::1]:3002", "[fd00::2]:3000", "[fd00::1]:3002"]),
        ("10.0.0.1,a.example,10.0.0.2:http,10.0.0.3:99999", ["10.0.0.1:3000"] * 3),
    ],
)
def test_a_request_goes_to_the_endpoints_it_names_in_turn(
    picker: ConformancePicker, selection: str, endpoints: list[str]
) -> None:
    assert chosen(picker, selection, times=3) == endpoints


def test_a_repeated_header_is_one_list(picker: ConformancePicker) -> None:
    assert chosen(picker, "10.0.0.1", "10.0.0.2", times=2) == ["10.0.0.1:3000", "10.0.0.2:3000"]


@pytest.mark.parametrize("selections", [(), ("",), (" , ",), ("a.example",)])
def test_a_request_that_names_no_endpoint_has_nowhere_to_go(
    picker: ConformancePicker, selections: tuple[str, ...]
) -> None:
    with pytest.raises(Refused) as refused:
        chosen(picker, *selections)
    assert refused.value.code is Refusal.NO_ENDPOINTS


def test_the_subset_hint_is_enough_and_bounds_what_is_named(picker: ConformancePicker) -> None:
    hint = ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert chosen(picker, hint=hint) == ["10.0.0.1:8000"]
    assert chosen(picker, "10.0.0.2:8000,10.0.0.9:8000", hint=hint) == ["10.0.0.2:8000"]
    with pytest.raises(Refused):
        chosen(picker, "10.0.0.9:8000", hint=hint)
    with pytest.raises(Refused):
        chosen(picker, "10.0.0.1:8000", hint=[])


async def test_with_a_pool_only_its_own_endpoints_are_chosen() -> None:
    async with pool_of(("10.0.0.1", 3000), ("10.0.0.1", 3002), ("fd00::1", 3000)) as picker:
        assert chosen(picker, times=3) == ["10.0.0.1:3000", "10.0.0.1:3002", "[fd00::1]:3000"]
        assert chosen(picker, "10.0.0.1", times=2) == ["10.0.0.1:3002", "10.0.0.1:3000"]
        assert chosen(picker, "10.0.0.1:3002,10.0.0.7") == ["10.0.0.1:3002"]
        with pytest.raises(Refused):
            chosen(picker, "10.0.0.7")


async def test_a_name_stands_for_every_address_behind_it() -> None:
    async with pool_of(("localhost", 3000)) as picker:
        assert chosen(picker, "127.0.0.1") == ["127.0.0.1:3000"]


@pytest.mark.parametrize(
    ("content", "served"),
    [
        (None, "fail: missing envoy lb metadata"),
        ({"other": {SERVED: "10.0.0.1:3000"}}, "fail: missing envoy lb metadata"),
        ({"envoy.lb": {"else": "1"}}, "fail: missing destination endpoint served metadata"),
        ({"envoy.lb": {SERVED: ""}}, "fail: missing destination endpoint served metadata"),
        ({"envoy.lb": {SERVED: "10.0.0.2:3000"}}, "10.0.0.2:3000"),
    ],
)
def test_an_answer_reports_who_served_by_the_gateways_word_alone(
    content: dict[str, dict[str, str]] | None, served: str
) -> None:
    message = h(context=None if content is None else metadata(content))
    assert report("10.0.0.1:3000", message) == {
        "x-conformance-test-served-endpoint": served,
        "x-conformance-test-selected-endpoint": "10.0.0.1:3000",
    }


def test_requests_are_refused_once_it_drains(picker: ConformancePicker) -> None:
    picker.retire()
    assert chosen(picker, "10.0.0.1") == ["10.0.0.1:3000"]
    assert picker.readiness == "draining"
    picker.drain()
    with pytest.raises(Refused) as refused:
        chosen(picker, "10.0.0.1")
    assert refused.value.code is Refusal.DRAINING
