"""llama.cpp's capacity: the context of one slot times the slots, from ``GET /props``."""

from __future__ import annotations

from typing import Final

import msgspec

from thunderagent_operator.probes.plan import JsonDocument, Plan
from thunderagent_operator.probes.reading import Capacity, MetricsPage, json_document, tokens

PREFIX: Final = "llamacpp:"


class _Generation(msgspec.Struct):
    n_ctx: int | float | None = None


class _Props(msgspec.Struct):
    default_generation_settings: _Generation | None = None
    total_slots: int | float | None = None


def probe(page: MetricsPage | None = None) -> Plan:
    """Read the server's properties; its metrics say nothing of its capacity."""
    body = yield JsonDocument("/props")
    return None if body is None else props_capacity(body)


def props_capacity(body: bytes) -> Capacity | None:
    """The capacity that the server's properties give. Raises UnreadableError."""
    props = json_document(body, _Props)
    settings = props.default_generation_settings
    context, slots = tokens(settings.n_ctx if settings else None), tokens(props.total_slots)
    held = None if context is None or slots is None else tokens(context * slots)
    return None if held is None else Capacity(held)
