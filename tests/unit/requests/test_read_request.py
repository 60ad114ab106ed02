"""read_request: what is inference, its model and size, and bodies that cannot be read."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent_epp.requests.headers import Headers
from thunderagent_epp.requests.inference import InferenceRequest, InvalidRequest, read_request
from thunderagent_epp.requests.policy import RequestPolicy

CHAT = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}


def read(body: bytes, **headers: str) -> InferenceRequest:
    changed = {name.replace("_", "-"): value for name, value in headers.items()}
    return read_request(Headers((CHAT | changed).items()), body, RequestPolicy())


def test_a_chat_request_is_read_whole():
    body = b'{"model":"qwen","stream":true,"messages":[{"role":"user","content":"hi"}],"max_tokens":5}'
    assert read(body, x_session_id="s", x_parent_session_id="p", x_dynamo_session_final="true") == InferenceRequest(
        path="/v1/chat/completions",
        inference=True,
        model="qwen",
        session="s",
        parent="p",
        final=True,
        stream=True,
        prompt_bytes=32,
    )


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/inference/v1/generate",
        "/generate",
        "/v1/messages?beta=true",
    ],
)
def test_a_known_path_is_inference_with_or_without_a_query(path):
    request = read_request(Headers((CHAT | {":path": path}).items()), b'{"prompt":"x"}', RequestPolicy())
    assert request.inference
    assert request.path == path.split("?")[0]


@pytest.mark.parametrize(
    "changed",
    [
        {":path": "/v1/models"},
        {":path": "/v1/chat/completions/"},
        {":path": "/V1/chat/completions"},
        {":path": "/v1/messages/count_tokens"},
        {":path": ""},
        {":method": "GET"},
        {":method": "PUT"},
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=application/json"},
        {"content-type": ""},
    ],
)
def test_any_other_path_method_or_content_type_is_passed_on_unread(changed):
    headers = Headers((CHAT | {"x-session-id": "\x00"} | changed).items())
    assert read_request(headers, b"no json", RequestPolicy()) == InferenceRequest(
        path=changed.get(":path", "/v1/chat/completions"), inference=False, prompt_bytes=7
    )


def test_a_request_without_any_headers_is_passed_on():
    assert read_request(Headers([]), b"", RequestPolicy()) == InferenceRequest(path="", inference=False)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        "application/json;charset=utf-8",
        " application/json ",
        "application/vnd.api+json",
        "application/problem+JSON; v=1",
    ],
)
def test_json_content_types(content_type):
    assert read(b"{}", content_type=content_type).inference


@pytest.mark.parametrize(
    ("body", "prompt_bytes"),
    [
        (b'{"messages":[1, 2]}', 6),
        (b'{"messages" :  [1, 2]  ,"x":9}', 6),
        (b'{"prompt":"abc"}', 5),
        ('{"prompt":"ü"}'.encode(), 4),
        (b'{"prompt":"\\u00fc"}', 8),
        (b'{"prompt":[1,2,3]}', 7),
        (b'{"input":"abc"}', 5),
        (b'{"tools":[{}],"messages":[]}', 6),
        (b'{"system":"abc","messages":[],"tools":[]}', 9),
        (b'{"instructions":"a","input":"b"}', 6),
        (b'{"messages":[],"tools":null}', 2),
        (b'{"pr\\u006fmpt":"abc"}', 5),
        # Nothing that is listed as a prompt field: the body counts whole.
        (b'{"text":"abc"}', 14),
        (b'{"input_ids":[1,2]}', 19),
        (b'{"messages":null}', 17),
        (b" {} ", 4),
    ],
)
def test_the_size_is_that_of_the_prompt_fields_as_sent(body, prompt_bytes):
    assert read(body).prompt_bytes == prompt_bytes


@pytest.mark.parametrize(
    ("body", "model", "stream"),
    [
        (b'{"model":"m","stream":true}', "m", True),
        (b'{"model":"org/m\\u00fc","stream":false}', "org/mü", False),
        (b'{"model":null,"stream":null}', "", False),
        (b'{"model":7,"stream":1}', "", False),
        (b'{"model":["m"],"stream":"true"}', "", False),
        (b"{}", "", False),
    ],
)
def test_model_and_stream_of_a_wrong_type_are_left_to_the_worker(body, model, stream):
    request = read(body)
    assert (request.model, request.stream) == (model, stream)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"no json", "the body does not parse: JSON is malformed: invalid character (byte 4)"),
        (b'{"a":1', "the body does not parse: Input data was truncated"),
        (b"{} {}", "the body does not parse: JSON is malformed: trailing characters (byte 4)"),
        (b'{"a":1,}', "the body does not parse: JSON is malformed: trailing comma in object (byte 7)"),
        (b" ", "the body does not parse: Input data was truncated"),
        (b'{"model":"\xff"}', "the body is not valid UTF-8 (byte 10)"),
        (b'{"messages":[{"role":"user","content":"caf\xe9"}]}', "the body is not valid UTF-8 (byte 42)"),
        (b'{"a":"\xed\xa0\x80"}', "the body is not valid UTF-8 (byte 6)"),
        (b'{"a":"' + "é".encode() * 600_000 + b'\xc3"}', "the body is not valid UTF-8 (byte 1200006)"),
        ('{"a":"é"}'.encode("utf-16-le"), "the body is not valid UTF-8 (byte 12)"),
        (b'{"program_id":"\\ud83d"}', "the body does not parse: a \\u escape is half of a surrogate pair"),
        (b'{"program_id":"\\ude00"}', "the body does not parse: a \\u escape is half of a surrogate pair"),
        (b'{"messages":"\\ud83d\\ud83d\\ude00"}', "the body does not parse: a \\u escape is half of a surrogate pair"),
        (b'{"a":"\\ud83d\\ude00",}', "the body does not parse: JSON is malformed: trailing comma in object (byte 20)"),
        (b'{"a":"\\\\ud83d",}', "the body does not parse: JSON is malformed: trailing comma in object (byte 15)"),
        (b"[]", "the body is not a JSON object"),
        (b'"text"', "the body is not a JSON object"),
        (b"null", "the body is not a JSON object"),
        (b'{"a":' + b"[" * 100_000, "the body is nested too deeply"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body, message):
    with pytest.raises(InvalidRequest) as refusal:
        read(body)
    assert str(refusal.value) == message


def test_a_body_that_was_not_seen_is_sized_by_its_declared_length():
    request = read(b"", x_session_id="s", content_length="4096")
    assert (request.inference, request.session, request.prompt_bytes) == (True, "s", 4096)


@pytest.mark.parametrize("declared", ["", "-5", "many", "1e3", "9" * 5000, "٣"])
def test_a_declared_length_that_is_none_counts_as_nothing(declared):
    assert read(b"", content_length=declared).prompt_bytes == 0


def test_the_bytes_that_came_count_more_than_the_declared_length():
    assert read(b'{"text":1}', content_length="99999").prompt_bytes == 10


def test_a_compressed_body_counts_whole_and_its_session_is_that_of_the_headers():
    request = read(b"\x28\xb5\x2f\xfd....", content_encoding="zstd", thread_id="t", x_dynamo_session_final="true")
    assert request == InferenceRequest(
        path="/v1/chat/completions", inference=True, session="t", final=True, prompt_bytes=8
    )


def test_the_identity_encoding_is_no_compression():
    assert read(b'{"model":"m"}', content_encoding="Identity").model == "m"


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body):
    with contextlib.suppress(InvalidRequest):
        assert read(body).inference


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_header_text_is_read_or_refused(session, length):
    with contextlib.suppress(InvalidRequest):
        assert read(b"", x_session_id=session, content_length=length).inference
