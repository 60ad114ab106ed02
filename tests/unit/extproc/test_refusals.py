"""The table of refusals (extproc.md, *Refusals*)."""

from __future__ import annotations

import json

import pytest

from thunderagent_epp.extproc.errors import Refusal, Refused, refusal_answer

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("code", "status", "retry_after"),
    [
        ("invalid_request", 400, None),
        ("body_too_large", 413, None),
        ("request_limit", 429, "1"),
        ("program_limit", 429, "1"),
        ("hold_limit", 429, "1"),
        ("hold_timeout", 429, "1"),
        ("no_endpoints", 503, "1"),
        ("no_snapshot", 503, "1"),
        ("draining", 503, "1"),
    ],
)
def test_each_code_has_its_status_and_retry_after(code: str, status: int, retry_after: str | None) -> None:
    answer = refusal_answer(Refused(Refusal(code)), CHAT)
    assert answer.status == status
    assert answer.headers.get("retry-after") == retry_after
    assert answer.headers["x-thunderagent-refusal"] == code
    assert answer.headers["content-type"] == "application/json"


def test_every_code_is_in_the_table() -> None:
    for code in Refusal:
        assert refusal_answer(Refused(code), CHAT).body


def test_an_openai_client_reads_its_own_form() -> None:
    answer = refusal_answer(Refused(Refusal.INVALID_REQUEST, "the body is not valid JSON"), CHAT)
    assert json.loads(answer.body) == {
        "error": {
            "message": "the body is not valid JSON",
            "type": "invalid_request_error",
            "code": "invalid_request",
            "param": None,
        }
    }


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens"])
def test_an_anthropic_client_reads_its_own_form(path: str) -> None:
    answer = refusal_answer(Refused(Refusal.NO_ENDPOINTS, "no live worker"), path)
    assert json.loads(answer.body) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "no live worker"},
    }


@pytest.mark.parametrize("path", ["/v1/messagesx", "/v2/v1/messages", ""])
def test_any_other_path_reads_openais_form(path: str) -> None:
    assert "type" not in json.loads(refusal_answer(Refused(Refusal.DRAINING), path).body)


def test_a_hold_timeout_says_the_interval_it_is_given_in_whole_seconds_rounded_up() -> None:
    refused = Refused(Refusal.HOLD_TIMEOUT, retry_after_seconds=4.2)
    assert refusal_answer(refused, CHAT).headers["retry-after"] == "5"


def test_a_client_is_never_told_to_retry_at_once() -> None:
    refused = Refused(Refusal.HOLD_TIMEOUT, retry_after_seconds=0.05)
    assert refusal_answer(refused, CHAT).headers["retry-after"] == "1"


def test_a_refusal_without_a_message_of_its_own_has_the_codes_sentence() -> None:
    assert Refused(Refusal.NO_ENDPOINTS).message == "No live worker can take this request; try again shortly."
    assert str(Refused(Refusal.DRAINING, "going")) == "draining: going"
