"""AnswerReader: usage and progress in answers as the servers send them, however they are cut and whatever they hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent_epp.requests.answer import AnswerReader, Usage, context_tokens, progress_tokens

SSE = "text/event-stream; charset=utf-8"
JSON = "application/json"

CHAT_STREAM = (
    b'data: {"id":"c1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n'
    b'data: {"id":"c1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"He"}}]}\n\n'
    b'data: {"id":"c1","choices":[{"index":0,"delta":{"content":"y"},"finish_reason":"stop"}],"usage":null}\n\n'
    b'data: {"id":"c1","choices":[],"usage":{"prompt_tokens":120,"total_tokens":122,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":96}}}\n\n'
    b"data: [DONE]\n\n"
)

RESPONSES_STREAM = (
    b"event: response.created\n"
    b'data: {"type":"response.created","response":{"id":"r1","status":"in_progress","usage":null}}\n\n'
    b"event: response.output_text.delta\n"
    b'data: {"type":"response.output_text.delta","delta":"Hi \\"usage\\""}\n\n'
    b"event: response.completed\n"
    b'data: {"type":"response.completed","response":{"id":"r1","output":[{"type":"message"}],"usage":'
    b'{"input_tokens":37,"input_tokens_details":{"cached_tokens":16},"output_tokens":11,"output_tokens_details":'
    b'{"reasoning_tokens":4},"total_tokens":48}}}\n\n'
)

MESSAGES_STREAM = (
    b"event: message_start\n"
    b'data: {"type":"message_start","message":{"id":"m1","role":"assistant","content":[],"usage":{"input_tokens":25,'
    b'"cache_creation_input_tokens":100,"cache_read_input_tokens":1000,"output_tokens":1}}}\n\n'
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":{"type":"text"}}\n\n'
    b'event: ping\ndata: {"type": "ping"}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hi"}}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"output_tokens":15}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)

# vLLM's /v1/messages fills in 0 for what it does not know, in either place.
VLLM_MESSAGES_STREAM = (
    b"event: message_start\n"
    b'data: {"message":{"usage":{"input_tokens":40,"output_tokens":0}},"type":"message_start"}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"input_tokens":0,"output_tokens":7}}\n\n'
)

CONTINUOUS_STREAM = b"".join(
    b'data: {"choices":[{"text":"x"}],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n' % n for n in (1, 2, 3)
)

COMMENTED_STREAM = (
    b": ping\n\n: another\n"
    b"id: 1\nretry: 10\n\n"
    b'data:{"choices":[]}\n\n'
    b"\n\n"
    b'data: {"choices":[],\ndata:  "usage":\ndata: {"prompt_tokens":5,"completion_tokens":6}}\n\n'
    b"data: [DONE]\n\n"
)

UNCLOSED_STREAM = b'data: {"choices":[]}\n\ndata: {"usage":{"prompt_tokens":3,"completion_tokens":4}}'

STREAMS = {
    "chat": (CHAT_STREAM, 4, Usage(120, 2)),
    "chat with CRLF": (CHAT_STREAM.replace(b"\n", b"\r\n"), 4, Usage(120, 2)),
    "responses": (RESPONSES_STREAM, 3, Usage(37, 11)),
    "messages": (MESSAGES_STREAM, 6, Usage(1125, 15)),
    "messages with CRLF": (MESSAGES_STREAM.replace(b"\n", b"\r\n"), 6, Usage(1125, 15)),
    "messages by vLLM": (VLLM_MESSAGES_STREAM, 2, Usage(40, 7)),
    "usage in every chunk": (CONTINUOUS_STREAM, 3, Usage(9, 3)),
    "comments and data over several lines": (COMMENTED_STREAM, 2, Usage(5, 6)),
    "no closing empty line": (UNCLOSED_STREAM, 2, Usage(3, 4)),
    "no usage": (b'data: {"choices":[]}\n\n' * 3 + b"data: [DONE]\n\n", 3, None),
    "empty": (b"", 0, None),
}


def read(content_type: str | None, *chunks: bytes, encoding: str | None = None, kept: int = 8192) -> AnswerReader:
    reader = AnswerReader(content_type, encoding, max_kept_bytes=kept)
    for chunk in chunks:
        reader.feed(chunk)
    reader.finish()
    return reader


@pytest.mark.parametrize(("stream", "events", "usage"), STREAMS.values(), ids=STREAMS)
def test_a_stream_is_read_wherever_it_is_cut(stream, events, usage):
    for cut in range(len(stream) + 1):
        reader = read(SSE, stream[:cut], stream[cut:])
        assert (reader.events, reader.usage, reader.body_bytes) == (events, usage, len(stream)), f"cut at {cut}"


@pytest.mark.parametrize(("stream", "events", "usage"), STREAMS.values(), ids=STREAMS)
def test_a_stream_is_read_byte_by_byte(stream, events, usage):
    reader = read(SSE, *[stream[n : n + 1] for n in range(len(stream))])
    assert (reader.events, reader.usage) == (events, usage)


CONCLUDED = {
    "chat": CHAT_STREAM,
    "chat with CRLF": CHAT_STREAM.replace(b"\n", b"\r\n"),
    "responses": RESPONSES_STREAM,
    "responses cut short by a limit": b'data: {"response":{"usage":null}, "type" : "response.incomplete"}\n\n',
    "messages": MESSAGES_STREAM,
}


@pytest.mark.parametrize("stream", CONCLUDED.values(), ids=CONCLUDED)
def test_a_stream_has_concluded_with_its_closing_event_and_not_before(stream):
    reader = AnswerReader(SSE)
    for byte in stream:
        assert not reader.concluded
        reader.feed(bytes([byte]))
    assert reader.concluded


@pytest.mark.parametrize(
    "stream",
    [
        b'data: {"type":"response.output_text.delta","delta":"response.completed"}\n\n',
        b'data: {"type":"content_block_delta","delta":{"type":"message_stop"}}\n\n',
        b'data: {"type":"response.failed"}\n\n',
        b'data: {"type":["message_stop"]}\n\n',
        b'data: "message_stop"\n\n',
        b'data: {"type":"message_stop"\n\n',
        b"data: [DONE",
        b": [DONE]\n\n",
        b"event: message_stop\n\n",
    ],
)
def test_a_stream_that_only_speaks_of_its_end_has_not_concluded(stream):
    assert not read(SSE, stream).concluded


def test_an_answer_that_is_no_stream_never_concludes_before_its_end():
    assert not read("application/json", b'{"type":"message_stop"}').concluded
    assert not read(SSE, b"data: [DONE]\n\n", encoding="gzip").concluded


@given(st.data())
def test_cuts_change_nothing_whatever_the_bytes(data):
    pieces = [
        b"data:",
        b"data",
        b"\n",
        b"\r\n",
        b"\r",
        b": x",
        b'{"usage":{"prompt_tokens":7}}',
        b"[DONE]",
        b" ",
        b"\xff",
    ]
    stream = b"".join(data.draw(st.lists(st.sampled_from(pieces), max_size=30)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    kept = data.draw(st.sampled_from([8, 40, 8192]))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    whole, cut = read(SSE, stream, kept=kept), read(SSE, *chunks, kept=kept)
    assert (cut.events, cut.usage, cut.body_bytes) == (whole.events, whole.usage, whole.body_bytes)


@given(st.sampled_from([SSE, JSON]), st.lists(st.binary(max_size=60), max_size=6), st.booleans())
def test_no_bytes_raise(content_type, chunks, as_usage):
    if as_usage:
        chunks = [b'data: {"usage":', *chunks, b"}\n\n"]
    reader = read(content_type, *chunks)
    assert context_tokens(reader, 10, 4.0) >= 10


def test_progress_is_known_while_the_stream_runs():
    reader = AnswerReader(SSE)
    reader.feed(b'data: {"a":1}\n\ndata: {"a"')
    assert reader.events == 1
    reader.feed(b":2}\n")
    assert reader.events == 1
    reader.feed(b"\n")
    assert reader.events == 2
    assert reader.streamed


def test_finishing_twice_counts_once():
    reader = read(SSE, b"data: {}")
    reader.finish()
    assert reader.events == 1
    reader = read(JSON, b'{"usage":{"prompt_tokens":1}}')
    reader.finish()
    assert reader.usage == Usage(1, None)


def usage_body(usage: object) -> bytes:
    return json.dumps({"id": "x", "usage": usage, "choices": []}).encode()


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (usage_body({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}), Usage(10, 5)),
        (
            usage_body({"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}),
            Usage(10, 5),
        ),
        # A proxy in front of OpenAI may add Anthropic's cache fields; prompt_tokens holds them already.
        (usage_body({"prompt_tokens": 10, "completion_tokens": 5, "cache_read_input_tokens": 8}), Usage(10, 5)),
        (usage_body({"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}), Usage(10, 5)),
        (usage_body({"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 7}), Usage(17, 5)),
        (
            usage_body({"input_tokens": 1, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 300}),
            Usage(321, None),
        ),
        (usage_body({"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": None}), Usage(10, 5)),
        (usage_body({"prompt_tokens": 8, "total_tokens": 8}), Usage(8, 0)),
        (usage_body({"prompt_tokens": 8, "total_tokens": 3}), Usage(8, None)),
        (usage_body({"prompt_tokens": 8}), Usage(8, None)),
        (usage_body({"completion_tokens": 8}), Usage(None, 8)),
        (usage_body({"prompt_tokens": 0, "completion_tokens": 0}), Usage(0, 0)),
        (usage_body({"prompt_tokens": "8", "completion_tokens": 5}), Usage(None, 5)),
        (usage_body({"prompt_tokens": -8, "completion_tokens": 5}), Usage(None, 5)),
        (usage_body({"prompt_tokens": True, "completion_tokens": 5}), Usage(None, 5)),
        (usage_body({"prompt_tokens": 8.5, "completion_tokens": 5}), Usage(None, 5)),
        (usage_body({"prompt_tokens": [8], "completion_tokens": 5}), Usage(None, 5)),
        (usage_body({"prompt_tokens": 10**9, "completion_tokens": 10**9 + 1}), Usage(10**9, None)),
        (usage_body({"prompt_tokens": 10**30, "completion_tokens": 5}), Usage(None, 5)),
        (usage_body({}), None),
        (usage_body(None), None),
        (usage_body([1]), None),
        (usage_body("8"), None),
        (b'{"usage":{"prompt_tokens":' + b"9" * 50_000 + b"}}", None),
        (b'{"usage":{"prompt_tokens":8}', None),
        (b'{"usage":' + b"[" * 100_000, None),
        (b'[{"usage":{"prompt_tokens":8}}]', None),
        (b'{"choices":[{"usage":{"prompt_tokens":8}}]}', None),
        (b'{"message":"the \\"usage\\"","response":7,"usage":{"prompt_tokens":8}}', Usage(8, None)),
        (b'{"response":{"usage":{"input_tokens":8,"output_tokens":1}}}', Usage(8, 1)),
        (b"", None),
        (b"\x00\xff", None),
    ],
)
def test_usage_of_a_json_answer(body, usage):
    reader = read(JSON, body[:7], body[7:], kept=1 << 20)
    assert (reader.usage, reader.events, reader.body_bytes) == (usage, 0, len(body))


def test_an_event_with_unreadable_usage_does_not_spoil_the_next():
    reader = read(SSE, b'data: {"usage":{\n\ndata: "usage"\n\ndata: {"usage":{"prompt_tokens":8}}\n\n')
    assert (reader.events, reader.usage) == (3, Usage(8, None))


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [
        (SSE, "gzip"),
        (JSON, "br"),
        ("text/plain", None),
        ("application/octet-stream", None),
        ("application/x-ndjson", None),
        ("", None),
        (None, None),
    ],
)
def test_an_answer_that_cannot_be_read_is_counted(content_type, encoding):
    body = b'data: {"usage":{"prompt_tokens":8}}\n\n'
    reader = read(content_type, body, encoding=encoding)
    assert (reader.events, reader.usage, reader.body_bytes, reader.streamed) == (0, None, 37, False)


@pytest.mark.parametrize("content_type", ["Text/Event-Stream", "text/event-stream;charset=utf-8", " text/event-stream"])
def test_content_types_of_a_stream(content_type):
    assert read(content_type, b"data: {}\n\n", encoding="identity").events == 1


def test_a_json_answer_of_more_than_the_kept_bytes_is_only_counted():
    body = usage_body({"prompt_tokens": 8})
    assert read(JSON, body[:20], body[20:], kept=len(body)).usage == Usage(8, None)
    reader = read(JSON, body[:20], body[20:], kept=len(body) - 1)
    assert (reader.usage, reader.body_bytes) == (None, len(body))


def test_an_event_of_more_than_the_kept_bytes_counts_without_being_read():
    line = b'data: {"usage":{"prompt_tokens":8}}'
    after = b'data: {"a":1}\n\n'
    for ending in (b"\n\n", b"\r\n\r\n"):
        exact = read(SSE, line, ending, after, kept=len(line))
        assert (exact.events, exact.usage) == (2, Usage(8, None))
        short = read(SSE, line[:30], line[30:], ending, after, kept=len(line) - 1)
        assert (short.events, short.usage) == (2, None)


def test_an_event_over_many_lines_is_kept_only_up_to_the_cap():
    line = b'data: {"usage":\ndata: {"prompt_tokens":8}}\n\n'
    assert read(SSE, line, kept=34).usage == Usage(8, None)
    reader = read(SSE, line, line, kept=30)
    assert (reader.events, reader.usage) == (2, None)


@pytest.mark.parametrize(
    ("content_type", "body", "tokens"),
    [
        (JSON, usage_body({"prompt_tokens": 100, "completion_tokens": 7}), 107),
        # Only one of the two is known: the other is estimated.
        (JSON, b'{"usage":{"completion_tokens":7}}', 57),
        (JSON, b'{"usage":{"prompt_tokens":100}}', 108),
        (JSON, b'{"choices":[]}', 54),
        ("text/plain", b"123456789", 53),
        (JSON, b"", 50),
        (None, b"", 50),
        (SSE, b"data: {}\n\n" * 9 + b"data: [DONE]\n\n", 59),
        (SSE, b"data: {}\n\n" * 9 + b'data: {"usage":{"prompt_tokens":100,"completion_tokens":20}}\n\n', 120),
        (SSE, b"data: {}\n\n" * 9 + b'data: {"usage":{"prompt_tokens":100}}\n\n', 110),
        (SSE, MESSAGES_STREAM, 1140),
    ],
)
def test_the_context_at_completion_is_usage_else_an_estimate(content_type, body, tokens):
    assert context_tokens(read(content_type, body), input_tokens=50, bytes_per_token=4.0) == tokens


def test_progress_adds_a_token_for_each_event_to_the_input():
    reader = AnswerReader(SSE)
    assert progress_tokens(reader, 50) == 50
    reader.feed(b"data: {}\n\n" * 20)
    assert progress_tokens(reader, 50) == 70


def test_progress_is_not_held_back_by_the_count_of_the_first_event():
    reader = AnswerReader(SSE)
    reader.feed(b'data: {"message":{"usage":{"input_tokens":100,"output_tokens":1}}}\n\n' + b"data: {}\n\n" * 20)
    assert progress_tokens(reader, 50) == 121


def test_progress_takes_counts_that_are_ahead_of_the_events():
    reader = AnswerReader(SSE)
    reader.feed(b'data: {"usage":{"prompt_tokens":100,"completion_tokens":5}}\n\n')
    assert progress_tokens(reader, 50) == 105
