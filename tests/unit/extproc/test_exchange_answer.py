"""The response side of one exchange, and its end: whatever ends it, it ends once."""

from __future__ import annotations

import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProtocolConfiguration
from hypothesis import given
from hypothesis import strategies as st
from proxy_messages import B, H, T, b, chunks, h, headers_set, kinds, metadata, protocol, t

from thunderagent_epp.extproc.actions import Action, Answer, Cause, Decide, Ended, Progress, Responding
from thunderagent_epp.extproc.errors import Refusal, Refused
from thunderagent_epp.extproc.exchange import Exchange, State, UnexpectedMessage

ENDPOINT = "10.0.0.1:8000"
USAGE = b'data: {"usage":{"prompt_tokens":11,"completion_tokens":7}}\n\n'


def feed(exchange: Exchange, *messages: ProcessingRequest) -> list[Action]:
    return [action for message in messages for action in exchange.receive(message)]


def routed(config: ProtocolConfiguration | None = None) -> Exchange:
    exchange = Exchange(1000)
    feed(exchange, H(config=config, end=True))
    exchange.route(ENDPOINT)
    return exchange


def answered_kinds(actions: list[Action]) -> list[str]:
    return kinds(action.response for action in actions if isinstance(action, Answer))


def answered_chunks(actions: list[Action]) -> list[tuple[bytes, bool]]:
    return chunks(action.response for action in actions if isinstance(action, Answer))


def ended(actions: list[Action]) -> Ended:
    (found,) = [action for action in actions if isinstance(action, Ended)]
    return found


# Cases 7, 8, 9 and 14 of the table.


def test_case_7_a_response_without_a_request_is_echoed_and_nothing_is_counted() -> None:
    exchange = Exchange(1000)
    actions = feed(exchange, h("200", "application/json"), b(b'{"a":'), b(b"1}", end=True))
    assert all(isinstance(action, Answer) for action in actions)
    assert answered_kinds(actions) == ["response_headers", "response_body", "response_body"]
    assert answered_chunks(actions) == [(b'{"a":', False), (b"1}", True)]
    assert exchange.close(Cause.CLOSED) is None


def test_case_8_a_streamed_answer_is_echoed_chunk_by_chunk_and_its_usage_read() -> None:
    actions = feed(routed(), h(), b(b"data: {}\n\n"), b(USAGE), b(b"", end=True))
    assert answered_chunks(actions) == [(b"data: {}\n\n", False), (USAGE, False), (b"", True)]
    end = ended(actions)
    assert (end.completed, end.cause) == (True, Cause.ANSWERED)
    assert end.reader is not None
    assert end.reader.usage is not None
    assert (end.reader.usage.prompt_tokens, end.reader.usage.completion_tokens) == (11, 7)


def test_case_9_trailers_end_an_answer_once() -> None:
    exchange = routed()
    actions = feed(exchange, h(), b(), t())
    assert answered_kinds(actions) == ["response_headers", "response_body", "response_trailers"]
    assert ended(actions).completed
    assert exchange.close(Cause.CLOSED) is None


def test_case_14_an_answer_with_status_500_is_passed_on_and_aborted_at_its_end() -> None:
    exchange = routed()
    actions = feed(exchange, h("500", "application/json"), b(b"{}"))
    assert actions[0] == Responding(ok=False, served=None)
    assert answered_chunks(actions) == [(b"{}", False)]
    actions = feed(exchange, b(b"", end=True))
    assert answered_chunks(actions) == [(b"", True)]
    assert (ended(actions).completed, ended(actions).cause) == (False, Cause.UPSTREAM_STATUS)


@pytest.mark.parametrize(
    ("status", "ok"), [("200", True), ("204", True), ("299", True), ("199", False), ("302", False), ("2", False)]
)
def test_only_a_2xx_answer_is_a_success(status: str, ok: bool) -> None:
    assert feed(routed(), h(status))[0] == Responding(ok=ok, served=None)


def test_response_headers_are_answered_at_once_and_mean_that_prefill_is_over() -> None:
    responding, answer = feed(routed(), h())
    assert responding == Responding(ok=True, served=None)
    assert answered_kinds([answer]) == ["response_headers"]


def test_the_endpoint_that_really_served_is_in_the_metadata() -> None:
    context = metadata({"envoy.lb": {"x-gateway-destination-endpoint-served": " 10.0.0.2:8000 "}})
    assert feed(routed(), h(context=context))[0] == Responding(ok=True, served="10.0.0.2:8000")


@pytest.mark.parametrize("fields", [{}, {"envoy.lb": {}}, {"envoy.lb": {"x-gateway-destination-endpoint-served": 3}}])
def test_metadata_without_a_served_endpoint_names_none(fields: dict[str, dict[str, object]]) -> None:
    assert feed(routed(), h(context=metadata(fields)))[0] == Responding(ok=True, served=None)


def test_response_headers_that_end_the_stream_complete_the_turn() -> None:
    actions = feed(routed(), h("204", end=True))
    assert ended(actions) == Ended(True, None, Cause.ANSWERED)
    assert answered_kinds(actions) == ["response_headers"]


def test_what_comes_after_the_end_is_echoed_and_not_counted() -> None:
    exchange = routed()
    feed(exchange, h(), b(b"", end=True))
    actions = feed(exchange, b(b"late", end=True), t())
    assert answered_kinds(actions) == ["response_body", "response_trailers"]
    assert len(actions) == 2


def test_a_json_answer_is_read_at_its_end() -> None:
    actions = feed(routed(), h("200", "application/json"), b(b'{"usage":{"prompt_'), b(b'tokens":5}}', end=True))
    reader = ended(actions).reader
    assert reader is not None
    assert reader.usage is not None
    assert reader.usage.prompt_tokens == 5


# Progress.


def test_progress_is_reported_every_20_events() -> None:
    exchange = routed()
    feed(exchange, h())
    reported = [
        (index, action.events)
        for index in range(1, 61)
        for action in feed(exchange, b(b'data: {"x":1}\n\n'))
        if isinstance(action, Progress)
    ]
    assert reported == [(20, 20), (40, 40), (60, 60)]


def test_a_chunk_of_many_events_is_reported_once() -> None:
    exchange = routed()
    feed(exchange, h())
    actions = feed(exchange, b(b'data: {"x":1}\n\n' * 45))
    assert [action for action in actions if isinstance(action, Progress)] == [Progress(45)]


def test_a_chunk_is_echoed_whole_even_when_it_is_large() -> None:
    exchange = routed()
    feed(exchange, h())
    assert answered_chunks(feed(exchange, b(b"x" * 100_000))) == [(b"x" * 100_000, False)]


# Response bodies in other forms.


@pytest.mark.parametrize("mode", [ProcessingMode.STREAMED, ProcessingMode.BUFFERED])
def test_a_streamed_or_buffered_response_body_is_passed_without_a_copy(mode: ProcessingMode.BodySendMode) -> None:
    actions = feed(routed(protocol(response=mode)), h(), b(USAGE, end=True))
    body = [action.response for action in actions if isinstance(action, Answer)][1]
    assert body.WhichOneof("response") == "response_body"
    assert not body.response_body.response.HasField("body_mutation")
    reader = ended(actions).reader
    assert reader is not None
    assert reader.usage is not None


# The end.


def test_where_bodies_are_not_sent_an_orderly_close_after_2xx_headers_completes_the_turn() -> None:
    exchange = routed(protocol(response=ProcessingMode.NONE))
    feed(exchange, h())
    assert exchange.close(Cause.CLOSED) == Ended(True, None, Cause.ANSWERED)


def test_where_bodies_are_not_sent_trailers_complete_the_turn() -> None:
    exchange = routed(protocol(response=ProcessingMode.NONE))
    assert ended(feed(exchange, h(), t())) == Ended(True, None, Cause.ANSWERED)


def test_where_bodies_are_not_sent_a_close_after_500_headers_aborts_the_turn() -> None:
    exchange = routed(protocol(response=ProcessingMode.NONE))
    feed(exchange, h("500"))
    assert exchange.close(Cause.CLOSED) == Ended(False, None, Cause.UPSTREAM_STATUS)


def test_where_bodies_are_not_sent_the_reset_that_follows_envoys_close_completes_the_turn_too() -> None:
    exchange = routed(protocol(response=ProcessingMode.NONE))
    feed(exchange, h())
    assert exchange.close(Cause.RESET) == Ended(True, None, Cause.ANSWERED)


@pytest.mark.parametrize("cause", [Cause.DRAIN, Cause.FAILED])
def test_where_bodies_are_not_sent_an_end_of_our_own_making_aborts_the_turn(cause: Cause) -> None:
    exchange = routed(protocol(response=ProcessingMode.NONE))
    feed(exchange, h())
    assert exchange.close(cause) == Ended(False, None, cause)


def test_a_proxy_that_does_not_say_and_shows_no_body_counts_as_one_that_sends_none() -> None:
    exchange = routed()
    feed(exchange, h())
    assert exchange.close(Cause.CLOSED) == Ended(True, None, Cause.ANSWERED)


def test_a_proxy_that_does_not_say_and_resets_before_any_body_aborts_the_turn() -> None:
    exchange = routed()
    feed(exchange, h())
    assert exchange.close(Cause.RESET) == Ended(False, None, Cause.RESET)


def test_where_bodies_are_sent_a_close_before_the_first_of_them_aborts_the_turn() -> None:
    exchange = routed(protocol())
    feed(exchange, h())
    assert exchange.close(Cause.CLOSED) == Ended(False, None, Cause.CLOSED)


def test_a_client_that_leaves_in_the_middle_of_an_answer_aborts_the_turn() -> None:
    exchange = routed()
    feed(exchange, h(), b())
    end = exchange.close(Cause.CLOSED)
    assert end is not None
    assert (end.completed, end.cause) == (False, Cause.CLOSED)
    assert end.reader is not None
    assert end.reader.events == 1


@pytest.mark.parametrize("cause", [Cause.CLOSED, Cause.RESET, Cause.DRAIN])
def test_a_client_that_leaves_once_the_answer_has_said_that_it_is_complete_completes_the_turn(cause: Cause) -> None:
    exchange = routed(protocol())
    feed(exchange, h(), b(b'data: {"usage":{"prompt_tokens":5}}\n\n'), b(b"data: [DONE]\n\n"))
    end = exchange.close(cause)
    assert end is not None
    assert (end.completed, end.cause) == (True, Cause.ANSWERED)
    assert end.reader is not None
    assert end.reader.usage is not None
    assert end.reader.usage.prompt_tokens == 5


def test_an_answer_that_says_it_is_complete_is_no_success_with_another_status() -> None:
    exchange = routed(protocol())
    feed(exchange, h("500"), b(b"data: [DONE]\n\n"))
    end = exchange.close(Cause.RESET)
    assert end is not None
    assert not end.completed


@pytest.mark.parametrize("cause", [Cause.CLOSED, Cause.RESET, Cause.DRAIN, Cause.FAILED])
def test_case_13_a_client_that_leaves_while_held_or_before_any_answer_aborts_the_turn(cause: Cause) -> None:
    held = Exchange(1000)
    feed(held, H(), B())
    assert held.close(cause) == Ended(False, None, cause)
    assert held.close(cause) is None
    assert routed().close(cause) == Ended(False, None, cause)


def test_a_client_that_leaves_before_its_request_was_whole_leaves_nothing_to_end() -> None:
    exchange = Exchange(1000)
    assert exchange.close(Cause.CLOSED) is None
    feed(exchange, H(), B(b"{", end=False))
    assert exchange.close(Cause.CLOSED) is None


def test_a_reply_of_the_proxys_own_ends_a_hold_and_is_passed_on() -> None:
    exchange = Exchange(1000)
    feed(exchange, H(), B())
    actions = feed(exchange, h("504", "text/plain"), b(b"timeout", end=True))
    assert actions[0] == Ended(False, None, Cause.LOCAL_REPLY)
    assert answered_kinds(actions) == ["response_headers", "response_body"]
    assert exchange.close(Cause.CLOSED) is None


def test_a_reply_of_the_proxys_own_to_half_a_request_is_passed_on_and_nothing_is_decided() -> None:
    exchange = Exchange(1000)
    actions = feed(exchange, H(), B(b"{", end=False), h("408", "text/plain", end=True), B(b"}"))
    assert answered_kinds(actions) == ["response_headers"]
    assert len(actions) == 1


# The invariant: after a Decide exactly one Ended, whatever comes in whatever order.

MESSAGES = st.sampled_from(
    [
        H(),
        H(end=True),
        H(config=protocol(ProcessingMode.BUFFERED, ProcessingMode.STREAMED)),
        H(config=protocol(ProcessingMode.STREAMED, ProcessingMode.NONE)),
        B(b"{}", end=False),
        B(),
        T(),
        h(),
        h("500"),
        h(end=True),
        b(),
        b(USAGE, end=True),
        t(),
        "route",
        "refuse",
    ]
)


@given(steps=st.lists(MESSAGES, max_size=12), cause=st.sampled_from(Cause))
def test_an_exchange_that_asked_for_a_decision_ends_exactly_once(
    steps: list[ProcessingRequest | str], cause: Cause
) -> None:
    exchange = Exchange(3)
    actions: list[Action] = []
    for step in steps:
        if isinstance(step, ProcessingRequest):
            try:
                actions += exchange.receive(step)
            except UnexpectedMessage:
                break
        elif exchange.state is State.DECIDING:
            actions += exchange.route(ENDPOINT) if step == "route" else exchange.refuse(Refused(Refusal.DRAINING))
    last = exchange.close(cause)
    if last is not None:
        actions.append(last)
    decisions = sum(isinstance(action, Decide) for action in actions)
    ends = sum(isinstance(action, Ended) for action in actions)
    assert decisions in (0, 1)
    assert ends == decisions
    assert exchange.close(cause) is None


@pytest.mark.parametrize("end", [False, True])
def test_headers_for_the_answer_are_set_in_the_response_headers_alone(end: bool) -> None:
    exchange = Exchange(1000)
    feed(exchange, H(end=True))
    seen: list[ProcessingRequest] = []

    def note(message: ProcessingRequest) -> dict[str, str]:
        seen.append(message)
        return {"x-said": "so"}

    exchange.route(ENDPOINT, answer_headers=note)
    actions = feed(exchange, h(end=end))
    (answer,) = [action.response for action in actions if isinstance(action, Answer)]
    assert headers_set(answer) == {"x-said": "so"}
    assert [message.WhichOneof("request") for message in seen] == ["response_headers"]
    assert len(feed(exchange, b(end=True))) == (1 if end else 2)
