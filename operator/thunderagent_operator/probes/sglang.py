"""SGLang's capacity: ``sglang:max_total_num_tokens``; before it (0.5.9) the labels of ``sglang:cache_config_info``;
without metrics, which SGLang serves only when asked to, its server's description of itself.

Tensor, pipeline and expert parallel ranks hold the same tokens each: the largest counts. Data-parallel ranks hold
different ones: they add up. ``sglang:hicache_host_total_tokens`` is a copy in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
from prometheus_client.samples import Sample

from thunderagent_operator.probes.plan import JsonDocument, Plan, ask_metrics
from thunderagent_operator.probes.reading import (
    Capacity,
    MetricsPage,
    json_document,
    largest,
    product,
    tokens,
    total,
    whole_number,
)

PREFIX: Final = "sglang:"

SERVER_INFO_PATHS: Final = ("/get_server_info", "/server_info")
"""The second replaces the first in newer versions."""


class _ServerInfo(msgspec.Struct):
    max_total_num_tokens: int | float | None = None
    page_size: int | float | None = None


def probe(page: MetricsPage | None = None) -> Plan:
    """Read the metrics, ``page`` if they are at hand already, then the server's description of itself."""
    known = capacity(page or (yield from ask_metrics()))
    if known is not None:
        return known
    for path in SERVER_INFO_PATHS:
        body = yield JsonDocument(path)
        if body is not None:
            return server_info_capacity(body)
    return None


def capacity(page: MetricsPage) -> Capacity | None:
    """The capacity that the metrics show. Raises UnreadableError."""
    page_size = next((size for one in page.series("sglang:page_size") if (size := tokens(one.value))), None)

    def max_total(series: Sample) -> Capacity | None:
        held = tokens(series.value)
        return None if held is None else Capacity(held, page_size)

    def cache_config(series: Sample) -> Capacity | None:
        pages = whole_number(series.labels.get("num_pages"))
        return product(pages, whole_number(series.labels.get("page_size")))

    return _over_ranks(page, "sglang:max_total_num_tokens", max_total) or _over_ranks(
        page, "sglang:cache_config_info", cache_config
    )


def server_info_capacity(body: bytes) -> Capacity | None:
    """The capacity that the server's description of itself gives. Raises UnreadableError."""
    described = json_document(body, _ServerInfo)
    held = tokens(described.max_total_num_tokens)
    return None if held is None else Capacity(held, tokens(described.page_size))


def _over_ranks(page: MetricsPage, name: str, read: Callable[[Sample], Capacity | None]) -> Capacity | None:
    ranks: dict[str, list[Capacity | None]] = {}
    for series in page.series(name):
        ranks.setdefault(series.labels.get("dp_rank", ""), []).append(read(series))
    return total(largest(replicas) for replicas in ranks.values()) if ranks else None
