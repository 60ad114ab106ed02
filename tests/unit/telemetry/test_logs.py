import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from thunderagent_epp.telemetry import logs

SHA_OF_S1 = "sha256:e8bc163c82ee"
"""printf %s s1 | sha256sum"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    names = [None, "thunderagent", *(f"thunderagent.{part}" for part in logs.PARTS)]
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    handlers = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = handlers
    for logger, level in levels:
        logger.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_time_level_logger_and_event_first() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    logs.logger("feed").info("policy file\nin force", snapshot=1)
    (line,) = lines(stream)
    assert list(line) == ["time", "level", "logger", "event", "snapshot"]
    assert line["time"].endswith("Z")
    assert line | {"time": ""} == {
        "time": "",
        "level": "info",
        "logger": "feed",
        "event": "policy file\nin force",
        "snapshot": 1,
    }


def test_one_part_can_be_raised_alone() -> None:
    stream = io.StringIO()
    logs.configure("info,scheduling=debug", "json", stream)
    logs.logger("scheduling").debug("counts")
    logs.logger("feed").debug("unseen")
    logs.logger("feed").info("seen")
    assert [line["event"] for line in lines(stream)] == ["counts", "seen"]


def test_one_part_can_be_lowered_alone() -> None:
    stream = io.StringIO()
    logs.configure("debug,requests=error", "json", stream)
    logs.logger("requests").warning("unseen")
    logs.logger("extproc").debug("seen")
    assert [line["event"] for line in lines(stream)] == ["seen"]


def test_configuring_again_replaces_what_was_configured_before() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure("feed=debug", "json", first)
    logs.configure("warning", "json", second)
    logs.logger("feed").info("unseen")
    logs.logger("feed").warning("seen")
    assert first.getvalue() == ""
    assert [line["event"] for line in lines(second)] == ["seen"]


def test_a_session_is_shown_as_given_at_debug_and_hashed_above() -> None:
    stream = io.StringIO()
    logs.configure("debug", "json", stream)
    log = logs.logger("scheduling")
    log.debug("released", session="s1")
    log.warning("forced", session="s1", parent="s1")
    debug, warning = lines(stream)
    assert debug["session"] == "s1"
    assert warning["session"] == SHA_OF_S1
    assert warning["parent"] == SHA_OF_S1
    assert logs.session_label("s1") == SHA_OF_S1


def test_a_session_stays_hashed_where_an_error_is_logged_with_its_traceback() -> None:
    stream = io.StringIO()
    logs.configure("debug", "json", stream)
    try:
        raise RuntimeError("no way")
    except RuntimeError:
        logs.logger("extproc").exception("exchange failed", session="s1")
    (line,) = lines(stream)
    assert line["session"] == SHA_OF_S1
    assert line["level"] == "error"
    assert "RuntimeError: no way" in line["exception"]


def test_library_logs_go_the_same_way_but_are_never_more_talkative_than_info() -> None:
    stream = io.StringIO()
    logs.configure("debug", "json", stream)
    logging.getLogger("grpc").warning("channel %s closed", 7)
    logging.getLogger("asyncio").debug("unseen")
    (line,) = lines(stream)
    assert (line["logger"], line["level"], line["event"]) == ("grpc", "warning", "channel 7 closed")


def test_a_terminal_gets_text_and_anything_else_json() -> None:
    terminal, file = Terminal(), io.StringIO()
    logs.configure("info", "auto", terminal)
    logs.logger("feed").info("hello")
    logs.configure("info", "auto", file)
    logs.logger("feed").info("hello")
    assert "hello" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
    assert lines(file)[0]["event"] == "hello"


def test_text_from_clients_cannot_move_a_terminals_cursor() -> None:
    stream = io.StringIO()
    logs.configure("debug", "console", stream)
    logs.logger("requests").debug("refused", session="\x1b[2Js1")
    assert "\x1b" not in stream.getvalue()
    assert r"\x1b[2Js1" in stream.getvalue()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("loud", "unknown log level 'loud': choose from debug, info, warning, error"),
        ("", "unknown log level '': choose from debug, info, warning, error"),
        ("info,feed=loud", "unknown log level 'loud': choose from debug, info, warning, error"),
        (
            "kernel=debug",
            "unknown part 'kernel' in the log level: choose from "
            "scheduling, requests, extproc, feed, telemetry, operator",
        ),
        ("info,debug", "a second level for everything: 'debug'"),
        ("feed=info,feed=debug", "a second log level for feed"),
    ],
)
def test_a_bad_level_is_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match="level") as caught:
        logs.parse_levels(spec)
    assert str(caught.value) == message


def test_levels_may_be_in_capitals_and_spaced() -> None:
    assert logs.parse_levels("WARNING, feed = Debug") == (logging.WARNING, {"feed": logging.DEBUG})


def test_a_bad_format_is_named() -> None:
    with pytest.raises(ValueError, match="unknown log format 'xml': choose from auto, json, console"):
        logs.configure("info", "xml")  # type: ignore[arg-type]
