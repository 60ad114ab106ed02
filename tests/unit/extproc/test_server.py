"""The server over gRPC: real streams on a port of its own, a director that does as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from fake_director import PLACEMENT, FakeDirector
from proxy_messages import B, H, b, chunks, h, headers_set, kinds, metadata, protocol, subset_hint, t

from thunderagent_epp.extproc.errors import Refusal, Refused
from thunderagent_epp.extproc.server import Server
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.telemetry.metrics import Metrics

Call = Any  # grpc.aio.StreamStreamCall, which is generic in the stubs only

SECONDS = 10  # no wait here is to come near it


class Served:
    """A running server and a proxy's channel to it."""

    def __init__(self, server: Server, port: int, director: FakeDirector, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.port = port
        self.director = director
        self._process = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )

    def stream(self) -> Call:
        return self._process()

    async def ended(self) -> Any:
        """What the oldest turn not asked for yet was told at its end."""
        turn = await asyncio.wait_for(self.director.turns.get(), SECONDS)
        await asyncio.wait_for(turn.over.wait(), SECONDS)
        return self.director.log[-1]

    def count(self, name: str, **labels: str) -> float:
        return self.server.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def serving(director: FakeDirector, max_body_bytes: int = 1_000_000) -> AsyncIterator[Served]:
    server = Server(cast(Any, director), Metrics(), max_body_bytes=max_body_bytes)
    port = await server.start("127.0.0.1", 0, None)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(server, port, director, channel)
    finally:
        await server.stop(0)
    assert server.open_streams == 0
    assert server.running_turns == 0


async def say(call: Call, *messages: ProcessingRequest) -> None:
    for message in messages:
        await call.write(message)


async def hear(call: Call, number: int) -> list[ProcessingResponse]:
    return [await asyncio.wait_for(call.read(), SECONDS) for _ in range(number)]


async def finish(call: Call) -> None:
    """Close the proxy's side and see the server close its own in order."""
    await call.done_writing()
    assert await asyncio.wait_for(call.read(), SECONDS) is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_case_9_a_full_exchange_is_completed_once() -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, H(), B(b'{"model":"m"}'))
        request = await hear(call, 2)
        assert kinds(request) == ["request_headers", "request_body"]
        assert headers_set(request[0]) == {"x-gateway-destination-endpoint": "10.0.0.1:8000"}
        assert chunks(request) == [(b'{"model":"m"}', True)]

        await say(call, h(), b(), t())
        assert kinds(await hear(call, 3)) == ["response_headers", "response_body", "response_trailers"]
        await finish(call)

        assert served.director.log == [("admitted", 13), ("responding", None), ("ended", True, "answered")]
        assert served.director.requests[0].model == "m"
        assert served.count("thunderagent_processing_duration_seconds_count") == 1


async def test_the_endpoint_that_served_and_the_progress_reach_the_director() -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, H(), B())
        await hear(call, 2)
        context = metadata({"envoy.lb": {"x-gateway-destination-endpoint-served": "10.0.0.2:8000"}})
        await say(call, h(context=context), b(b'data: {"x":1}\n\n' * 20), b(b"", end=True))
        await hear(call, 3)
        await finish(call)
        assert served.director.log[1:] == [
            ("responding", "10.0.0.2:8000"),
            ("progress", 20),
            ("ended", True, "answered"),
        ]


async def test_case_3_a_body_that_is_no_json_is_refused_before_the_director_hears_of_it() -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, H(), B(b"no json"))
        (response,) = await hear(call, 1)
        assert response.immediate_response.status.code == 400
        assert headers_set(response)["x-thunderagent-refusal"] == "invalid_request"
        message = json.loads(response.immediate_response.body)["error"]["message"]
        assert message.startswith("The request cannot be read: the body ")
        assert await call.read() is grpc.aio.EOF
        assert served.director.requests == []
        assert served.count("thunderagent_refusals_total", code="invalid_request") == 1
        assert served.count("thunderagent_requests_total", path="/v1/chat/completions", outcome="refused") == 1


async def test_case_4_the_subset_reaches_the_director() -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, H(context=subset_hint(["10.0.0.7:8000"])), B())
        await hear(call, 2)
        (subset,) = served.director.subsets
        assert subset is not None
        assert subset.allows("10.0.0.7:8000")
        assert not subset.allows("10.0.0.1:8000")


@pytest.mark.parametrize("message", [(H(), B()), (H(end=True),)])
async def test_cases_5_and_6_without_an_endpoint_the_request_is_refused_with_503(message: Any) -> None:
    async with serving(FakeDirector(refusal=Refused(Refusal.NO_ENDPOINTS))) as served:
        call = served.stream()
        await say(call, *message)
        (response,) = await hear(call, 1)
        assert response.immediate_response.status.code == 503
        assert headers_set(response)["retry-after"] == "1"
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_case_7_a_response_without_a_request_is_echoed_and_nothing_is_counted() -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, h("200", "application/json"), b(b"{"), b(b"}", end=True))
        assert chunks(await hear(call, 3)) == [(b"{", False), (b"}", True)]
        await finish(call)
        assert served.director.log == []


async def test_case_12_a_held_request_is_answered_when_it_is_released() -> None:
    async with serving(FakeDirector(held=True)) as served:
        call = served.stream()
        await say(call, H(), B(b"{}"))
        turn = await served.director.turns.get()
        assert turn.release is not None
        turn.release.set_result(PLACEMENT)
        assert chunks(await hear(call, 2)) == [(b"{}", True)]
        await say(call, h(), b(b"", end=True))
        assert kinds(await hear(call, 2)) == ["response_headers", "response_body"]
        await finish(call)
        assert served.director.log[1:] == ["waiting", ("responding", None), ("ended", True, "answered")]


async def test_a_hold_that_ends_in_a_refusal_ends_the_stream_with_it() -> None:
    async with serving(FakeDirector(held=True)) as served:
        call = served.stream()
        await say(call, H(), B())
        turn = await served.director.turns.get()
        assert turn.release is not None
        turn.release.set_exception(Refused(Refusal.HOLD_TIMEOUT, retry_after_seconds=5))
        (response,) = await hear(call, 1)
        assert response.immediate_response.status.code == 429
        assert headers_set(response)["retry-after"] == "5"
        # The proxy has not closed its side, and need not.
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert served.director.log[-1] == ("ended", False, "refused")
        assert served.count("thunderagent_refusals_total", code="hold_timeout") == 1


async def test_case_13_a_client_that_resets_while_held_ends_the_hold() -> None:
    async with serving(FakeDirector(held=True)) as served:
        call = served.stream()
        await say(call, H(), B())
        await served.director.waiting.wait()
        call.cancel()
        turn = await served.director.turns.get()
        await asyncio.wait_for(turn.over.wait(), SECONDS)
        ends = [entry for entry in served.director.log if entry[0] == "ended"]
        assert ends in ([("ended", False, "reset")], [("ended", False, "closed")])


async def test_a_proxy_that_closes_its_side_while_held_ends_the_hold() -> None:
    async with serving(FakeDirector(held=True)) as served:
        call = served.stream()
        await say(call, H(), B())
        await served.director.waiting.wait()
        await finish(call)
        assert served.director.log[1:] == ["waiting", ("ended", False, "closed"), "wait cancelled"]


async def test_a_reply_of_the_proxys_own_while_held_ends_the_hold_and_is_answered() -> None:
    async with serving(FakeDirector(held=True)) as served:
        call = served.stream()
        await say(call, H(), B())
        await served.director.waiting.wait()
        await say(call, h("504", "text/plain"), b(b"timeout", end=True))
        assert kinds(await hear(call, 2)) == ["response_headers", "response_body"]
        await finish(call)
        assert served.director.log[1:] == ["waiting", ("ended", False, "local_reply"), "wait cancelled"]


async def test_case_13_a_client_that_resets_while_answered_aborts_the_turn() -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, H(), B())
        await hear(call, 2)
        await say(call, h(), b())
        await hear(call, 2)
        call.cancel()
        assert (await served.ended())[:2] == ("ended", False)


async def test_a_reset_is_not_taken_for_the_close_that_completes_an_answer_whose_body_was_not_seen() -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, H(), B())
        await hear(call, 2)
        await say(call, h())
        await hear(call, 1)
        call.cancel()
        assert await served.ended() == ("ended", False, "reset")


async def test_an_orderly_close_completes_an_answer_whose_body_is_not_sent() -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, H(config=protocol(response=ProcessingMode.NONE)), B())
        await hear(call, 2)
        await say(call, h())
        await hear(call, 1)
        await finish(call)
        assert served.director.log[-1] == ("ended", True, "answered")


async def test_case_14_an_answer_with_status_500_aborts_the_turn_at_its_end() -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, H(), B())
        await hear(call, 2)
        await say(call, h("500", "application/json"), b(b"{}", end=True))
        assert chunks(await hear(call, 2)) == [(b"{}", True)]
        await finish(call)
        assert served.director.log[-1] == ("ended", False, "upstream_status")


async def test_a_body_over_the_limit_is_refused_while_it_is_still_coming() -> None:
    async with serving(FakeDirector(), max_body_bytes=10) as served:
        call = served.stream()
        await say(call, H(), B(b"0123456789a", end=False))
        (response,) = await hear(call, 1)
        assert response.immediate_response.status.code == 413
        await say(call, B(b"more", end=False))
        await finish(call)
        assert served.director.requests == []


async def test_fields_that_the_policy_names_are_taken_out_of_the_body() -> None:
    director = FakeDirector()
    director.policy = RequestPolicy(strip_body_fields=("program_id",))
    async with serving(director) as served:
        call = served.stream()
        await say(call, H(), B(b'{"program_id":"p","model":"m"}'))
        assert chunks(await hear(call, 2)) == [(b'{"model":"m"}', True)]
        assert director.requests[0].session == "p"


async def test_a_body_without_the_named_fields_stays_as_it_is_when_held() -> None:
    director = FakeDirector(held=True)
    director.policy = RequestPolicy(strip_body_fields=("program_id",))
    async with serving(director) as served:
        call = served.stream()
        await say(call, H(), B(b'{"model": "m"}'))
        turn = await director.turns.get()
        assert turn.release is not None
        turn.release.set_result(PLACEMENT)
        assert chunks(await hear(call, 2)) == [(b'{"model": "m"}', True)]


async def test_a_message_without_a_meaning_fails_the_stream_and_says_what_to_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, B())
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "set request_header_mode to SEND" in await call.details()
    assert len(caplog.records) == 1


async def test_a_failure_of_our_own_is_logged_once_and_ends_the_turn(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, H(), B())
        await hear(call, 2)
        turn = await served.director.turns.get()

        def fail(served: str | None) -> None:
            raise RuntimeError("a bug")

        turn.responding = fail  # type: ignore[method-assign]
        await say(call, h())
        assert await call.code() is grpc.StatusCode.INTERNAL
        assert served.director.log[-1] == ("ended", False, "failed")
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_a_failure_while_held_is_logged_once_and_ends_the_turn(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeDirector(held=True)) as served:
        call = served.stream()
        await say(call, H(), B())
        turn = await served.director.turns.get()
        assert turn.release is not None
        turn.release.set_exception(RuntimeError("a bug"))
        assert await call.code() is grpc.StatusCode.INTERNAL
        assert served.director.log[-1] == ("ended", False, "failed")
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_a_burst_of_more_streams_than_grpc_keeps_waiting_by_itself_is_served() -> None:
    async with serving(FakeDirector(held=True)) as served:
        calls = [served.stream() for _ in range(1500)]
        await asyncio.gather(*(say(call, H(end=True)) for call in calls))
        for _ in calls:
            turn = await asyncio.wait_for(served.director.turns.get(), SECONDS)
            assert turn.release is not None
            turn.release.set_result(PLACEMENT)
        for call in calls:
            assert kinds(await hear(call, 1)) == ["request_headers"]
        for call in calls:
            await call.done_writing()


# Drain and stop.


async def test_a_drain_waits_for_running_turns_and_goes_on_answering() -> None:
    async with serving(FakeDirector()) as served:
        running = served.stream()
        await say(running, H(), B())
        await hear(running, 2)
        drain = asyncio.create_task(served.server.drain(SECONDS))
        served.director.refusal = Refused(Refusal.DRAINING)

        new = served.stream()
        await say(new, H(), B())
        (refused,) = await hear(new, 1)
        assert refused.immediate_response.status.code == 503
        assert headers_set(refused)["x-thunderagent-refusal"] == "draining"
        assert not drain.done()

        await say(running, h(), b(b"", end=True))
        assert kinds(await hear(running, 2)) == ["response_headers", "response_body"]
        await finish(running)
        await asyncio.wait_for(drain, SECONDS)
        assert served.director.log[-1] == ("ended", True, "answered")


async def test_a_drain_whose_time_is_over_cuts_off_what_still_runs() -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, H(), B())
        await hear(call, 2)
        await asyncio.wait_for(served.server.drain(0), SECONDS)
        assert served.director.log[-1] == ("ended", False, "drain")
        assert served.server.open_streams == 0


async def test_streams_without_a_turn_do_not_keep_a_drain_waiting() -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, h())
        await hear(call, 1)
        assert served.server.open_streams == 1
        assert served.server.running_turns == 0
        await call.done_writing()
        await asyncio.wait_for(served.server.drain(SECONDS), SECONDS)


async def test_a_drain_that_is_cancelled_leaves_the_server_serving() -> None:
    async with serving(FakeDirector()) as served:
        call = served.stream()
        await say(call, H(), B())
        await hear(call, 2)
        drain = asyncio.create_task(served.server.drain(SECONDS))
        await asyncio.sleep(0)
        drain.cancel()
        await asyncio.wait((drain,))
        await say(call, h(end=True))
        assert kinds(await hear(call, 1)) == ["response_headers"]
        await finish(call)
        assert served.director.log[-1] == ("ended", True, "answered")


async def test_a_port_that_is_taken_is_an_error_at_the_start() -> None:
    async with serving(FakeDirector()) as served:
        other = Server(cast(Any, FakeDirector()), Metrics())
        port = served.port
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await other.start("127.0.0.1", port, None)


async def test_services_are_added_beside_the_picker() -> None:
    added: list[grpc.aio.Server] = []
    server = Server(cast(Any, FakeDirector()), Metrics(), services=(added.append,))
    await server.start("127.0.0.1", 0, None)
    await server.stop(0)
    assert len(added) == 1
