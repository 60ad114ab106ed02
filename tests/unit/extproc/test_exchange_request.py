"""The request side of one exchange: reading, deciding, answering in the form in which the messages came."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from proxy_messages import B, H, T, b, chunks, h, headers_set, kinds, protocol, subset_hint

from thunderagent_epp.extproc.actions import Action, Answer, Cause, Decide, Ended, Refuse
from thunderagent_epp.extproc.errors import Refusal, Refused
from thunderagent_epp.extproc.exchange import Exchange, State, UnexpectedMessage

ENDPOINT = "10.0.0.1:8000"


def feed(exchange: Exchange, *messages: ProcessingRequest) -> list[Action]:
    return [action for message in messages for action in exchange.receive(message)]


def decided(exchange: Exchange, *messages: ProcessingRequest) -> Decide:
    """Feed messages that must lead to nothing but one decision."""
    (decide,) = feed(exchange, *messages)
    assert isinstance(decide, Decide)
    return decide


def sent(answers: Iterable[Answer]) -> list[ProcessingResponse]:
    return [answer.response for answer in answers]


# Cases 1, 2, 10 and 11 of the table, and what is around them.


def test_case_1_nothing_is_answered_until_the_request_is_whole_and_routed() -> None:
    exchange = Exchange(1000)
    assert feed(exchange, H()) == []
    decide = decided(exchange, B(b'{"model":"m"}'))
    assert decide.body == b'{"model":"m"}'
    assert decide.headers.get(":path") == "/v1/chat/completions"
    assert decide.subset is None

    responses = sent(exchange.route(ENDPOINT))

    assert kinds(responses) == ["request_headers", "request_body"]
    common = responses[0].request_headers.response
    assert common.clear_route_cache
    assert headers_set(responses[0]) == {"x-gateway-destination-endpoint": ENDPOINT}
    assert responses[0].dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == ENDPOINT
    assert chunks(responses) == [(b'{"model":"m"}', True)]


def test_case_2_a_body_in_two_parts_is_answered_joined() -> None:
    exchange = Exchange(1000)
    assert feed(exchange, H(), B(b'{"max_tok', end=False)) == []
    assert decided(exchange, B(b'ens":1}')).body == b'{"max_tokens":1}'
    assert chunks(sent(exchange.route(ENDPOINT))) == [(b'{"max_tokens":1}', True)]


def test_the_end_of_stream_may_come_in_an_empty_message_of_its_own() -> None:
    exchange = Exchange(1000)
    assert feed(exchange, H(), B(b"{}", end=False)) == []
    assert decided(exchange, B(b"", end=True)).body == b"{}"
    assert chunks(sent(exchange.route(ENDPOINT))) == [(b"{}", True)]


def test_case_10_the_destination_a_client_sent_is_overwritten() -> None:
    exchange = Exchange(1000)
    headers = {":path": "/", "x-gateway-destination-endpoint": "1.1.1.1:666", "content-length": "99999"}
    decided(exchange, H(headers), B())
    (option,) = sent(exchange.route(ENDPOINT))[0].request_headers.response.header_mutation.set_headers
    assert option.header.raw_value == b"10.0.0.1:8000"
    assert option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD


@pytest.mark.parametrize(
    ("size", "sizes"),
    [(0, [0]), (1, [1]), (62_000, [62_000]), (62_001, [62_000, 1]), (124_001, [62_000, 62_000, 1])],
)
def test_case_11_a_body_goes_in_chunks_of_at_most_62000_bytes(size: int, sizes: list[int]) -> None:
    exchange = Exchange(1_000_000)
    body = bytes(index % 251 for index in range(size))
    decided(exchange, H(), B(body))
    parts = chunks(sent(exchange.route(ENDPOINT)))
    assert [len(part) for part, _ in parts] == sizes
    assert [end for _, end in parts] == [False] * (len(sizes) - 1) + [True]
    assert b"".join(part for part, _ in parts) == body


def test_headers_that_end_the_stream_are_decided_at_once_and_answered_alone() -> None:
    exchange = Exchange(1000)
    assert decided(exchange, H(end=True)).body == b""
    assert kinds(sent(exchange.route(ENDPOINT))) == ["request_headers"]


def test_trailers_end_a_request_and_are_answered_last() -> None:
    exchange = Exchange(1000)
    assert feed(exchange, H(), B(b"{}", end=False)) == []
    assert decided(exchange, T()).body == b"{}"
    responses = sent(exchange.route(ENDPOINT))
    assert kinds(responses) == ["request_headers", "request_body", "request_trailers"]
    assert chunks(responses) == [(b"{}", False)]


def test_trailers_without_a_body_bring_no_body_into_the_answer() -> None:
    exchange = Exchange(1000)
    decided(exchange, H(), T())
    assert kinds(sent(exchange.route(ENDPOINT))) == ["request_headers", "request_trailers"]


def test_body_messages_after_the_first_end_of_stream_are_ignored() -> None:
    exchange = Exchange(1000)
    decided(exchange, H(), B(b"{}"))
    assert feed(exchange, B(b"{}")) == []
    assert chunks(sent(exchange.route(ENDPOINT))) == [(b"{}", True)]
    assert feed(exchange, B(b"{}"), T()) == []


def test_a_header_value_is_in_raw_value_else_in_value_and_repeated_headers_stay_repeated() -> None:
    message = H([("x-a", "1"), ("X-A", "2")])
    message.request_headers.headers.headers.add(key="x-a", value="3")
    message.request_headers.headers.headers.add(key="x-b", raw_value=b"caf\xc3\xa9 \xff")
    exchange = Exchange(1000)
    headers = decided(exchange, message, B()).headers
    assert headers.all("x-a") == ("1", "2", "3")
    assert headers.get("x-b") == "café \udcff"


def test_different_values_that_are_no_utf8_are_different_values() -> None:
    message = H([])
    message.request_headers.headers.headers.add(key="x-a", raw_value=b"\xff\xfe")
    message.request_headers.headers.headers.add(key="x-a", raw_value=b"\xfe\xff")
    first, second = decided(Exchange(1000), message, B()).headers.all("x-a")
    assert first != second


def test_headers_only_the_picker_understands_do_not_reach_a_worker() -> None:
    exchange = Exchange(1000)
    decided(exchange, H(), B())
    removed = sent(exchange.route(ENDPOINT))[0].request_headers.response.header_mutation.remove_headers
    assert sorted(name for name in removed if name.startswith("x-thunderagent-")) == [
        "x-thunderagent-parent-session-id",
        "x-thunderagent-session-final",
        "x-thunderagent-session-id",
    ]


def test_headers_that_name_one_worker_to_another_are_taken_from_the_client() -> None:
    exchange = Exchange(1000)
    decided(exchange, H(), B())
    removed = sent(exchange.route(ENDPOINT))[0].request_headers.response.header_mutation.remove_headers
    assert sorted(name for name in removed if not name.startswith("x-thunderagent-")) == [
        "x-data-parallel-host-port",
        "x-dp-rank",
        "x-dynamo-dp-rank",
        "x-dynamo-prefill-dp-rank",
        "x-dynamo-prefill-instance-id",
        "x-dynamo-routing-mode",
        "x-dynamo-worker-instance-id",
        "x-prefill-dp-rank",
        "x-prefill-instance-id",
        "x-prefiller-host-port",
        "x-worker-instance-id",
    ]


def test_a_header_that_is_set_is_not_removed_as_well() -> None:
    exchange = Exchange(1000)
    decided(exchange, H(), B())
    answer = sent(exchange.route(ENDPOINT, set_headers={"x-prefiller-host-port": "10.0.0.2:8000"}))[0]
    assert headers_set(answer)["x-prefiller-host-port"] == "10.0.0.2:8000"
    removed = answer.request_headers.response.header_mutation.remove_headers
    assert "x-prefiller-host-port" not in removed
    assert "x-dynamo-dp-rank" in removed


def test_further_headers_are_set_beside_the_destination() -> None:
    exchange = Exchange(1000)
    decided(exchange, H(), B())
    answer = sent(exchange.route("[fd00::1]:8000", set_headers={"x-data-parallel-rank": "3"}))[0]
    assert headers_set(answer) == {"x-gateway-destination-endpoint": "[fd00::1]:8000", "x-data-parallel-rank": "3"}


def test_further_headers_of_one_request_are_not_seen_by_the_next() -> None:
    first, second = Exchange(1000), Exchange(1000)
    decided(first, H(end=True))
    decided(second, H(end=True))
    first.route(ENDPOINT, set_headers={"x-data-parallel-rank": "3"})
    assert headers_set(sent(second.route(ENDPOINT))[0]) == {"x-gateway-destination-endpoint": ENDPOINT}


def test_a_replaced_body_is_sent_instead_of_what_came() -> None:
    exchange = Exchange(1000)
    decided(exchange, H(), B(b'{"program_id":"p"}'))
    assert chunks(sent(exchange.route(ENDPOINT, body=b"{}"))) == [(b"{}", True)]


# The subset hint.


def test_the_subset_may_come_with_the_headers() -> None:
    exchange = Exchange(1000)
    subset = decided(exchange, H(context=subset_hint(["10.0.0.1:8000"])), B()).subset
    assert subset is not None
    assert subset.allows("10.0.0.1:8000")
    assert not subset.allows("10.0.0.2:8000")


def test_the_subset_may_come_with_the_body() -> None:
    exchange = Exchange(1000)
    subset = decided(exchange, H(), B(context=subset_hint("10.0.0.1"))).subset
    assert subset is not None
    assert subset.allows("10.0.0.1:8000")


def test_an_empty_subset_is_not_an_absent_one() -> None:
    exchange = Exchange(1000)
    subset = decided(exchange, H(context=subset_hint([])), B()).subset
    assert subset is not None
    assert not subset.allows("10.0.0.1:8000")


# Refusals.


def test_a_refusal_is_the_only_answer() -> None:
    exchange = Exchange(1000)
    decided(exchange, H(), B(b"no json"))
    ended, refuse = exchange.refuse(Refused(Refusal.INVALID_REQUEST, "the body is not valid JSON"))
    assert ended == Ended(False, None, Cause.REFUSED)
    assert isinstance(refuse, Refuse)
    assert (refuse.code, refuse.path) == (Refusal.INVALID_REQUEST, "/v1/chat/completions")
    immediate = refuse.response.immediate_response
    assert immediate.status.code == 400
    assert headers_set(refuse.response) == {
        "content-type": "application/json",
        "x-thunderagent-refusal": "invalid_request",
    }
    assert json.loads(immediate.body)["error"]["message"] == "the body is not valid JSON"
    assert immediate.details == "thunderagent_invalid_request"
    assert exchange.over
    assert feed(exchange, B(), h(), b()) == []
    assert exchange.close(Cause.CLOSED) is None


def test_a_refusal_on_the_messages_path_has_anthropics_form() -> None:
    exchange = Exchange(1000)
    decided(exchange, H({":path": "/v1/messages?beta=true"}), B())
    _, refuse = exchange.refuse(Refused(Refusal.NO_ENDPOINTS))
    assert isinstance(refuse, Refuse)
    assert json.loads(refuse.response.immediate_response.body)["type"] == "error"


def test_a_body_over_the_limit_is_refused_at_once() -> None:
    exchange = Exchange(10)
    assert feed(exchange, H(), B(b"0123456789", end=False)) == []
    (refuse,) = feed(exchange, B(b"a", end=False))
    assert isinstance(refuse, Refuse)
    assert refuse.code == Refusal.BODY_TOO_LARGE
    assert refuse.response.immediate_response.status.code == 413
    assert "10 bytes" in json.loads(refuse.response.immediate_response.body)["error"]["message"]


def test_the_rest_of_a_body_over_the_limit_is_dropped_until_its_end() -> None:
    exchange = Exchange(1)
    feed(exchange, H(), B(b"ab", end=False))
    assert feed(exchange, B(b"c", end=False)) == []
    assert not exchange.over
    assert feed(exchange, B(b"d", end=True)) == []
    assert exchange.over


def test_a_body_at_the_limit_is_taken() -> None:
    assert decided(Exchange(10), H(), B(b"0123456789")).body == b"0123456789"


# Proxies that send less, or otherwise.


def test_a_proxy_that_sends_no_body_has_the_headers_decided_and_answered() -> None:
    exchange = Exchange(1000)
    decide = decided(exchange, H(config=protocol(ProcessingMode.NONE)))
    assert decide.body == b""
    assert kinds(sent(exchange.route(ENDPOINT))) == ["request_headers"]


def test_trailers_after_headers_that_were_decided_alone_are_passed() -> None:
    exchange = Exchange(1000)
    decided(exchange, H(config=protocol(ProcessingMode.NONE)))
    exchange.route(ENDPOINT)
    (answer,) = feed(exchange, T())
    assert isinstance(answer, Answer)
    assert kinds([answer.response]) == ["request_trailers"]


def test_a_buffered_body_has_its_headers_answered_first_and_the_destination_in_its_own_answer() -> None:
    exchange = Exchange(1000)
    (go_on,) = feed(exchange, H(config=protocol(ProcessingMode.BUFFERED)))
    assert isinstance(go_on, Answer)
    assert kinds([go_on.response]) == ["request_headers"]
    assert not go_on.response.request_headers.response.HasField("header_mutation")

    assert decided(exchange, B(b"{}")).body == b"{}"
    (answer,) = sent(exchange.route(ENDPOINT))

    assert answer.WhichOneof("response") == "request_body"
    assert headers_set(answer) == {"x-gateway-destination-endpoint": ENDPOINT}
    assert answer.request_body.response.clear_route_cache
    assert not answer.request_body.response.HasField("body_mutation")
    assert answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == ENDPOINT


def test_a_buffered_body_that_is_replaced_brings_its_new_length() -> None:
    exchange = Exchange(1000)
    feed(exchange, H(config=protocol(ProcessingMode.BUFFERED)))
    decided(exchange, B(b'{"program_id":"p"}'))
    (answer,) = sent(exchange.route(ENDPOINT, body=b"{}"))
    assert answer.request_body.response.body_mutation.body == b"{}"
    assert headers_set(answer)["content-length"] == "2"


def test_trailers_of_a_buffered_request_are_passed_after_its_body() -> None:
    exchange = Exchange(1000)
    feed(exchange, H(config=protocol(ProcessingMode.BUFFERED)))
    decided(exchange, B(b"{}", end=False))
    exchange.route(ENDPOINT)
    (answer,) = feed(exchange, T())
    assert isinstance(answer, Answer)
    assert kinds([answer.response]) == ["request_trailers"]


def test_a_buffered_body_that_may_be_cut_short_is_not_shown() -> None:
    exchange = Exchange(1000)
    feed(exchange, H(config=protocol(ProcessingMode.BUFFERED_PARTIAL)))
    assert decided(exchange, B(b'{"mod', end=False)).body == b""


def test_a_streamed_body_that_does_not_wait_for_headers_has_each_of_its_chunks_answered() -> None:
    exchange = Exchange(1000)
    config = protocol(ProcessingMode.STREAMED, without_waiting=True)
    assert feed(exchange, H(config=config), B(b"{", end=False)) == []
    assert decided(exchange, B(b"}")).body == b"{}"
    responses = sent(exchange.route(ENDPOINT))
    assert kinds(responses) == ["request_headers", "request_body", "request_body"]
    assert headers_set(responses[0]) == {"x-gateway-destination-endpoint": ENDPOINT}
    assert not any(response.request_body.response.HasField("body_mutation") for response in responses[1:])


def test_a_streamed_body_that_is_replaced_goes_with_its_last_chunk() -> None:
    exchange = Exchange(1000)
    feed(exchange, H(config=protocol(ProcessingMode.STREAMED, without_waiting=True)), B(b"{", end=False))
    decided(exchange, B(b"}"))
    _, first, last = sent(exchange.route(ENDPOINT, body=b"[]"))
    assert first.request_body.response.body_mutation.clear_body
    assert last.request_body.response.body_mutation.body == b"[]"


def test_a_streamed_body_that_waits_for_headers_is_decided_without_it_and_passed_by() -> None:
    exchange = Exchange(1000)
    assert decided(exchange, H(config=protocol(ProcessingMode.STREAMED))).body == b""
    assert kinds(sent(exchange.route(ENDPOINT))) == ["request_headers"]
    for message in (B(b"{", end=False), B(b"}")):
        (answer,) = feed(exchange, message)
        assert isinstance(answer, Answer)
        assert kinds([answer.response]) == ["request_body"]
    assert feed(exchange, B(b"}")) == []


# What has no meaning.


def test_a_body_without_headers_names_the_setting_to_mend() -> None:
    with pytest.raises(UnexpectedMessage, match="set request_header_mode to SEND"):
        Exchange(1000).receive(B())


def test_a_second_request_on_a_stream_is_unexpected() -> None:
    exchange = Exchange(1000)
    feed(exchange, H())
    with pytest.raises(UnexpectedMessage, match="request_headers came while reading"):
        exchange.receive(H())


def test_a_kind_of_message_from_the_future_is_passed_over() -> None:
    exchange = Exchange(1000)
    assert exchange.receive(ProcessingRequest()) == ()
    assert exchange.state is State.IDLE
