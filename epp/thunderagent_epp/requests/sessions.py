"""Which program a request belongs to, by the headers that coding agents send.

Called for every inference request. Identities become dictionary keys, log fields and lines of the status API, so
they are bounded in length and free of control characters before anything else sees them (extproc.md, "What a
request says").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .headers import Headers
from .invalid import InvalidRequest

MAX_IDENTITY_BYTES = 256
"""UTF-8 bytes of one session, agent or parent value."""

EPP_ONLY_HEADERS = ("x-thunderagent-session-id", "x-thunderagent-parent-session-id", "x-thunderagent-session-final")
"""Headers that no one but the EPP understands; those of other harnesses may mean something to the worker."""

_FINAL_HEADERS = ("x-thunderagent-session-final", "x-dynamo-session-final")

_CONTROL_CHARACTER = re.compile("[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """One row of the session table: the header, what refines it, and where the parent is named."""

    name: str
    agent: str | None = None
    parent: str | None = None


SESSION_HEADERS = (
    SessionHeader("x-thunderagent-session-id", parent="x-thunderagent-parent-session-id"),
    SessionHeader("x-dynamo-session-id", parent="x-dynamo-parent-session-id"),
    SessionHeader("x-claude-code-session-id", agent="x-claude-code-agent-id", parent="x-claude-code-parent-agent-id"),
    SessionHeader("thread-id", parent="x-codex-parent-thread-id"),
    SessionHeader("session-id", parent="x-codex-parent-thread-id"),
    SessionHeader("x-deepseek-harness-session-id", parent="x-deepseek-harness-parent-session-id"),
    SessionHeader("x-session-id", parent="x-parent-session-id"),
    SessionHeader("x-session-affinity", parent="x-parent-session-id"),
)
"""The built-in list, asked first to last."""

_KNOWN = {row.name: row for row in SESSION_HEADERS}


class Identity(NamedTuple):
    """A program and the program that started it, if any."""

    session: str
    parent: str | None = None


def identify(headers: Headers, session_headers: tuple[str, ...] | None = None) -> Identity | None:
    """Read the session from the headers: the first one named in the list that is there and not empty wins.

    ``session_headers`` replaces the built-in list; a built-in name in it keeps its refinement and parent. With a
    refinement the identity is ``session/agent``, and the parent ``session/parent agent``, else the bare session.
    Returns None without a session. Raises InvalidRequest when a value that counts is too long or holds a control
    character.
    """
    rows = SESSION_HEADERS if session_headers is None else _rows(session_headers)
    for row in rows:
        session = _value(headers, row.name)
        if session is not None:
            return _refine(headers, row, session)
    return None


def is_final(headers: Headers) -> bool:
    """Tell whether the client announces the last turn of its session."""
    return any((headers.get(name) or "").strip().lower() == "true" for name in _FINAL_HEADERS)


def checked_identity(value: str, source: str) -> str | None:
    """Trim a session value and return it, None if nothing is left.

    ``source`` names where it came from, for the client. Raises InvalidRequest when it is longer than
    ``MAX_IDENTITY_BYTES``, holds a control character or is no Unicode text.
    """
    value = value.strip(" \t\r\n")
    if value.isascii() and value.isprintable():
        size_bytes = len(value)
    else:
        if _CONTROL_CHARACTER.search(value):
            raise InvalidRequest(f"{source} holds a control character")
        try:
            size_bytes = len(value.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(f"{source} is not valid UTF-8") from None
    if size_bytes > MAX_IDENTITY_BYTES:
        raise InvalidRequest(f"{source} is {size_bytes} bytes long, {MAX_IDENTITY_BYTES} are allowed")
    return value or None


@lru_cache(maxsize=16)
def _rows(names: tuple[str, ...]) -> tuple[SessionHeader, ...]:
    return tuple(_KNOWN.get(name) or SessionHeader(name) for name in names)


def _value(headers: Headers, name: str) -> str | None:
    if headers.get(name) is None:
        return None
    for value in headers.all(name):
        checked = checked_identity(value, f"header {name}")
        if checked is not None:
            return checked
    return None


def _refine(headers: Headers, row: SessionHeader, session: str) -> Identity:
    agent = _value(headers, row.agent) if row.agent else None
    parent = _value(headers, row.parent) if row.parent else None
    identity = session if agent is None else f"{session}/{agent}"
    if row.agent:
        if parent is not None:
            parent = f"{session}/{parent}"
        elif agent is not None:
            parent = session
    return Identity(identity, None if parent == identity else parent)
