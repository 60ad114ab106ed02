"""How requests are read: the part of a ThunderAgentPolicy that concerns them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """``session_headers``: lower-case names asked first to last, None for the built-in list of extproc.md.

    ``strip_body_fields``: top-level fields of a JSON body that are not passed on; empty leaves bodies untouched.
    """

    session_headers: tuple[str, ...] | None = None
    strip_body_fields: tuple[str, ...] = ()
