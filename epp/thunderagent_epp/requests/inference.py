"""What an inference request says: its program, its size, whether it streams.

The exchange calls ``read_request`` once, when a request has come in whole. What is no inference request is not an
error but is passed on unread, and one that only pretends to be JSON is refused here, before it can occupy a worker
(extproc.md, "What a request says").
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .body import RequestBody, parse_body
from .headers import Headers
from .invalid import InvalidRequest
from .policy import RequestPolicy
from .sessions import Identity, checked_identity, identify, is_final

__all__ = ["INFERENCE_PATHS", "InferenceRequest", "InvalidRequest", "read_request"]

INFERENCE_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/inference/v1/generate",
        "/generate",
    }
)
"""Paths whose POST requests with a JSON body are inference; any other request is passed on, selected by load."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request as admission sees it.

    ``path`` has no query string. ``inference`` is False for what is passed on by load; such a request has neither
    model nor session. ``session`` is the program's identity including a sub-agent's refinement, None when the
    request names none; ``parent`` the identity of the program that started it. ``stream`` tells that the client
    asks for a streamed answer. ``prompt_bytes`` is the size of the prompt fields in the body, that of the whole
    body when it has none or cannot be looked into. ``headers`` are those it came with.
    """

    path: str
    inference: bool
    model: str = ""
    session: str | None = None
    parent: str | None = None
    final: bool = False
    stream: bool = False
    prompt_bytes: int = 0
    headers: Headers = field(default_factory=Headers, compare=False, repr=False)


def read_request(headers: Headers, body: bytes, policy: RequestPolicy) -> InferenceRequest:
    """Read a request from its headers and whole body.

    An empty body is one that was not seen (the proxy may send headers only): session headers count, the size is
    what ``content-length`` says. An encoded body (``content-encoding``) is not looked into either.
    Raises InvalidRequest when an inference request's body is no JSON object or a session value that counts is
    unusable; the message names the header or field.
    """
    path = (headers.get(":path") or "").partition("?")[0]
    if path not in INFERENCE_PATHS or headers.get(":method") != "POST" or not is_json(headers.get("content-type")):
        return InferenceRequest(path=path, inference=False, prompt_bytes=_size(headers, body), headers=headers)

    identity = identify(headers, policy.session_headers)
    final = is_final(headers)
    if not body or is_encoded(headers.get("content-encoding")):
        return InferenceRequest(
            path=path,
            inference=True,
            session=identity.session if identity else None,
            parent=identity.parent if identity else None,
            final=final,
            prompt_bytes=_size(headers, body),
            headers=headers,
        )

    parsed = parse_body(body)
    identity = identity or _identity_in(parsed)
    return InferenceRequest(
        path=path,
        inference=True,
        model=parsed.model_name(),
        session=identity.session if identity else None,
        parent=identity.parent if identity else None,
        final=final,
        stream=parsed.asks_for_stream(),
        prompt_bytes=parsed.prompt_bytes() or len(body),
        headers=headers,
    )


def is_json(content_type: str | None) -> bool:
    """Tell whether a content type is ``application/json`` or of a ``+json`` kind; parameters do not matter."""
    media_type = (content_type or "").partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")


def is_encoded(content_encoding: str | None) -> bool:
    """Tell whether a body is compressed, so that its bytes are not those of its content type."""
    return (content_encoding or "").strip().lower() not in ("", "identity")


def _identity_in(body: RequestBody) -> Identity | None:
    for name, value in body.program_ids():
        session = checked_identity(value, f"body field {name}")
        if session is not None:
            return Identity(session)
    return None


def _size(headers: Headers, body: bytes) -> int:
    if body:
        return len(body)
    declared = headers.get("content-length") or ""
    # A length of more digits is no body that any proxy lets through.
    return int(declared) if declared.isascii() and declared.isdigit() and len(declared) <= 12 else 0
