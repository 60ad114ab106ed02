"""TensorRT-LLM's capacity: the blocks of its KV cache times the tokens of a block (TensorRT-LLM 1.3).

``trtllm-serve`` has its Prometheus metrics under ``/prometheus/metrics``; at ``/metrics`` it answers JSON.
"""

from __future__ import annotations

from typing import Final

from thunderagent_operator.probes.plan import MetricsText, Plan, ask_metrics
from thunderagent_operator.probes.reading import Capacity, MetricsPage, UnreadableError, largest, product, tokens

PREFIX: Final = "trtllm_"

SERVE_METRICS: Final = MetricsText("/prometheus/metrics")


def probe(page: MetricsPage | None = None) -> Plan:
    """Read the metrics, ``page`` if they are at hand already, then those at the path of ``trtllm-serve``."""
    try:
        page = page or (yield from ask_metrics())
    except UnreadableError:
        page = MetricsPage(b"")
    return capacity(page) or capacity((yield from ask_metrics(SERVE_METRICS)))


def capacity(page: MetricsPage) -> Capacity | None:
    """The capacity that the metrics show. Raises UnreadableError."""
    sizes = {_owner(series.labels): tokens(series.value) for series in page.series("trtllm_kv_cache_tokens_per_block")}
    common = next(iter(sizes.values())) if len(set(sizes.values())) == 1 else None
    return largest(
        product(tokens(series.value), sizes.get(_owner(series.labels), common))
        for series in page.series("trtllm_kv_cache_max_blocks")
    )


def _owner(labels: dict[str, str]) -> frozenset[tuple[str, str]]:
    """Which engine a series is about: both metrics carry the same labels."""
    return frozenset(labels.items())
