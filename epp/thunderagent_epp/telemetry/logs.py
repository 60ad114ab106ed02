"""Structured logs: one line an event on stderr, for the project's parts and for the libraries alike.

Each part of the process takes its logger from `logger` at import; `configure` is called once by the command line
and only decides what is shown and how. Protects clients' session ids: under the keys of ``SESSION_KEYS`` they are
shown as given in DEBUG events only, which nobody sees who has not asked for them, and hashed in all others.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Mapping
from typing import Final, Literal, TextIO

import structlog
from structlog.stdlib import BoundLogger, ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

Part = Literal["scheduling", "requests", "extproc", "feed", "telemetry", "operator"]
Format = Literal["auto", "json", "console"]

PARTS: Final[tuple[Part, ...]] = ("scheduling", "requests", "extproc", "feed", "telemetry", "operator")
FORMATS: Final[tuple[Format, ...]] = ("auto", "json", "console")
LEVELS: Final[Mapping[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
SESSION_KEYS: Final = ("session", "parent")

_NAMESPACE: Final = "thunderagent"


def session_label(session: str) -> str:
    """A session id as it is logged above DEBUG: stable, and the same as the first digits ``sha256sum`` prints."""
    return f"sha256:{hashlib.sha256(session.encode('utf-8', 'surrogateescape')).hexdigest()[:12]}"


def _hide_sessions(_: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if method != "debug":
        for key in SESSION_KEYS:
            if isinstance(event.get(key), str):
                event[key] = session_label(event[key])
    return event


def _name_part(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    event["logger"] = event["logger"].removeprefix(f"{_NAMESPACE}.")
    return event


_COMMON: Final[tuple[Processor, ...]] = (
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    _name_part,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
)
_OF_EVENTS: Final[tuple[Processor, ...]] = (
    structlog.stdlib.filter_by_level,
    *_COMMON,
    _hide_sessions,
    ProcessorFormatter.wrap_for_formatter,
)


def logger(part: Part) -> BoundLogger:
    """The logger of one part. ``log.info("what happened", session=…)``; the event is constant text, the rest keys."""
    return BoundLogger(logging.getLogger(f"{_NAMESPACE}.{part}"), processors=_OF_EVENTS, context={})


def parse_levels(spec: str) -> tuple[int, dict[Part, int]]:
    """Read ``info,scheduling=debug``: one level for everything (info by default), then parts with their own.

    Raises ValueError that names the unknown part or level.
    """
    base: int | None = None
    parts: dict[Part, int] = {}
    for item in spec.split(","):
        name, separator, level = (word.strip().lower() for word in item.rpartition("="))
        if level not in LEVELS:
            raise ValueError(f"unknown log level {level!r}: choose from {', '.join(LEVELS)}")
        if not separator:
            if base is not None:
                raise ValueError(f"a second level for everything: {level!r}")
            base = LEVELS[level]
            continue
        part = next((part for part in PARTS if part == name), None)
        if part is None:
            raise ValueError(f"unknown part {name!r} in the log level: choose from {', '.join(PARTS)}")
        if part in parts:
            raise ValueError(f"a second log level for {part}")
        parts[part] = LEVELS[level]
    return logging.INFO if base is None else base, parts


def configure(level_spec: str = "info", format: Format = "auto", stream: TextIO | None = None) -> None:
    """Send every log of the process to ``stream`` (stderr) at these levels; replaces what was configured before.

    ``auto`` is for people on a terminal and JSON elsewhere. Libraries are never more talkative than INFO.
    Raises ValueError that names the unknown part, level or format.
    """
    base, parts = parse_levels(level_spec)
    if format not in FORMATS:
        raise ValueError(f"unknown log format {format!r}: choose from {', '.join(FORMATS)}")
    stream = sys.stderr if stream is None else stream
    terminal = stream.isatty()
    people = format == "console" or (format == "auto" and terminal)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=[*_COMMON, structlog.stdlib.ExtraAdder()],
            processors=[
                ProcessorFormatter.remove_processors_meta,
                *(_for_people(colors=terminal) if people else _for_machines()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(base, logging.INFO))
    logging.getLogger(_NAMESPACE).setLevel(base)
    for part in PARTS:
        logging.getLogger(f"{_NAMESPACE}.{part}").setLevel(parts.get(part, logging.NOTSET))


def _for_people(*, colors: bool) -> list[Processor]:
    return [
        structlog.dev.ConsoleRenderer(
            colors=colors,
            timestamp_key="time",
            # As Python would write it: a client's text may hold what moves a terminal's cursor.
            repr_native_str=True,
            exception_formatter=structlog.dev.plain_traceback,
        )
    ]


def _for_machines() -> list[Processor]:
    return [
        structlog.processors.format_exc_info,
        _in_order,
        structlog.processors.JSONRenderer(default=str),
    ]


def _in_order(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """What every line has first, so that a column of lines can be read."""
    first = {key: event.pop(key) for key in ("time", "level", "logger", "event") if key in event}
    return {**first, **event}
