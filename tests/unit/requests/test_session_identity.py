"""Session identity: every row of the session table of extproc.md, and what is refused."""

from __future__ import annotations

import pytest

from thunderagent_epp.requests.headers import Headers
from thunderagent_epp.requests.inference import InferenceRequest, InvalidRequest, read_request
from thunderagent_epp.requests.policy import RequestPolicy

REQUEST = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}


def read(headers: dict[str, str], body: bytes = b"{}", names: tuple[str, ...] | None = None) -> InferenceRequest:
    return read_request(Headers((REQUEST | headers).items()), body, RequestPolicy(session_headers=names))


@pytest.mark.parametrize(
    ("headers", "session", "parent"),
    [
        ({"x-thunderagent-session-id": "s"}, "s", None),
        ({"x-thunderagent-session-id": "s", "x-thunderagent-parent-session-id": "p"}, "s", "p"),
        ({"x-dynamo-session-id": "s"}, "s", None),
        ({"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}, "s", "p"),
        ({"x-claude-code-session-id": "s"}, "s", None),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, "s/a", "s"),
        (
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "a",
                "x-claude-code-parent-agent-id": "b",
            },
            "s/a",
            "s/b",
        ),
        ({"thread-id": "s"}, "s", None),
        ({"thread-id": "s", "x-codex-parent-thread-id": "p"}, "s", "p"),
        ({"session-id": "s"}, "s", None),
        ({"session-id": "s", "x-codex-parent-thread-id": "p"}, "s", "p"),
        ({"session-id": "old", "thread-id": "new"}, "new", None),
        ({"x-deepseek-harness-session-id": "s"}, "s", None),
        ({"x-deepseek-harness-session-id": "s", "x-deepseek-harness-parent-session-id": "p"}, "s", "p"),
        ({"x-session-id": "s", "x-parent-session-id": "p"}, "s", "p"),
        ({"x-session-affinity": "s"}, "s", None),
        ({"x-session-affinity": "s", "x-parent-session-id": "p"}, "s", "p"),
        ({"x-session-affinity": "b", "x-session-id": "a"}, "a", None),
        # A parent or refinement without its session header says nothing.
        ({"x-thunderagent-parent-session-id": "p"}, None, None),
        ({"x-claude-code-agent-id": "a"}, None, None),
        # Those of one harness do not go with the session of another.
        ({"x-session-id": "s", "x-claude-code-agent-id": "a", "x-dynamo-parent-session-id": "p"}, "s", None),
        # No program is its own parent.
        ({"x-session-id": "s", "x-parent-session-id": "s"}, "s", None),
        ({"X-Session-ID": "s"}, "s", None),
        ({}, None, None),
    ],
)
def test_a_session_is_read_from_its_header(headers, session, parent):
    request = read(headers)
    assert (request.session, request.parent) == (session, parent)


ORDER = [
    "x-thunderagent-session-id",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "x-deepseek-harness-session-id",
    "x-session-id",
    "x-session-affinity",
]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_first_header_of_the_table_wins(first):
    headers = {name: f"value of {name}" for name in reversed(ORDER[first:])}
    assert read(headers, b'{"program_id":"body"}').session == f"value of {ORDER[first]}"


@pytest.mark.parametrize(
    ("body", "session"),
    [
        (b'{"program_id":"p"}', "p"),
        (b'{"program_id":" p "}', "p"),
        (b'{"extra_body":{"program_id":"e"}}', "e"),
        (b'{"extra_body":{"program_id":"e"},"program_id":"p"}', "p"),
        (b'{"extra_body":{"program_id":"e"},"program_id":""}', "e"),
        (b'{"extra_body":{"program_id":"e"},"program_id":null}', "e"),
        (b'{"extra_body":{"program_id":null}}', None),
        (b'{"extra_body":{}}', None),
        (b'{"extra_body":"program_id"}', None),
        (b'{"extra_body":[{"program_id":"e"}]}', None),
        (b'{"metadata":{"program_id":"m"}}', None),
        ('{"program_id":"Prüfung"}'.encode(), "Prüfung"),
        (b'{"program_id":"Pr\\u00fcfung"}', "Prüfung"),
    ],
)
def test_without_a_header_the_body_names_the_session(body, session):
    assert read({}, body).session == session


@pytest.mark.parametrize("empty", ["", "   ", "\t"])
def test_an_empty_header_is_absent(empty):
    assert read({"x-thunderagent-session-id": empty, "x-session-id": "s"}).session == "s"
    assert read({"x-session-id": "s", "x-parent-session-id": empty}).parent is None
    assert read({"x-claude-code-session-id": "s", "x-claude-code-agent-id": empty}).session == "s"


def test_values_are_trimmed():
    request = read({"x-session-id": "  s 1\t", "x-parent-session-id": " p "})
    assert (request.session, request.parent) == ("s 1", "p")


def test_the_first_value_of_a_repeated_header_that_is_not_empty_counts():
    headers = Headers([*REQUEST.items(), ("x-session-id", ""), ("x-session-id", "a"), ("x-session-id", "b")])
    assert read_request(headers, b"{}", RequestPolicy()).session == "a"


@pytest.mark.parametrize("value", ["s" * 256, "ü" * 128])
def test_a_value_of_256_bytes_is_taken(value):
    assert read({"x-session-id": value}).session == value


LONG = "is 257 bytes long, 256 are allowed"


@pytest.mark.parametrize(
    ("headers", "body", "message"),
    [
        ({"x-session-id": "s" * 257}, b"{}", f"header x-session-id {LONG}"),
        ({"x-session-id": "ü" * 128 + "s"}, b"{}", f"header x-session-id {LONG}"),
        ({"thread-id": "a\x00b"}, b"{}", "header thread-id holds a control character"),
        ({"thread-id": "a\x7f"}, b"{}", "header thread-id holds a control character"),
        ({"thread-id": "a\tb"}, b"{}", "header thread-id holds a control character"),
        ({"thread-id": "a\x85b"}, b"{}", "header thread-id holds a control character"),
        ({"thread-id": "a\udcff"}, b"{}", "header thread-id is not valid UTF-8"),
        (
            {"x-session-id": "s", "x-parent-session-id": "p\x01"},
            b"{}",
            "header x-parent-session-id holds a control character",
        ),
        (
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a" * 257},
            b"{}",
            f"header x-claude-code-agent-id {LONG}",
        ),
        ({}, b'{"program_id":"' + b"p" * 257 + b'"}', f"body field program_id {LONG}"),
        ({}, b'{"program_id":"a\\u0000"}', "body field program_id holds a control character"),
        ({}, b'{"program_id":7}', "body field program_id must be a string"),
        ({}, b'{"program_id":{}}', "body field program_id must be a string"),
        ({}, b'{"program_id":"\xff"}', "the body is not valid UTF-8 (byte 15)"),
        ({}, b'{"extra_body":{"program_id":false}}', "body field extra_body.program_id must be a string"),
    ],
)
def test_an_unusable_value_is_refused_by_name(headers, body, message):
    with pytest.raises(InvalidRequest) as refusal:
        read(headers, body)
    assert str(refusal.value) == message


def test_a_value_that_does_not_count_is_not_checked():
    assert read({"thread-id": "s", "x-session-id": "x" * 999}, b'{"program_id":7}').session == "s"


def test_the_policy_replaces_the_list_of_headers():
    names = ("x-team-session", "x-claude-code-session-id")
    assert read({"x-session-id": "s"}, names=names).session is None
    assert read({"x-team-session": "t", "x-claude-code-session-id": "s"}, names=names).session == "t"


def test_a_known_header_in_the_policys_list_keeps_its_refinement_and_parent():
    headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a", "x-thunderagent-session-id": "t"}
    request = read(headers, names=("x-claude-code-session-id", "x-thunderagent-session-id"))
    assert (request.session, request.parent) == ("s/a", "s")


def test_the_body_comes_last_whatever_the_policys_list():
    assert read({}, b'{"program_id":"p"}', names=()).session == "p"
    assert read({"x-team": "t"}, b'{"program_id":"p"}', names=("x-team",)).session == "t"


@pytest.mark.parametrize(
    ("headers", "final"),
    [
        ({"x-thunderagent-session-final": "true"}, True),
        ({"x-thunderagent-session-final": " True "}, True),
        ({"x-dynamo-session-final": "true"}, True),
        ({"x-thunderagent-session-final": "false", "x-dynamo-session-final": "true"}, True),
        ({"x-thunderagent-session-final": "1"}, False),
        ({"x-thunderagent-session-final": "yes"}, False),
        ({"x-thunderagent-session-final": ""}, False),
        ({}, False),
    ],
)
def test_a_final_turn_is_announced_by_the_value_true(headers, final):
    assert read({"x-session-id": "s"} | headers).final is final
