"""vLLM's capacity: the labels of ``vllm:cache_config_info`` (vLLM 0.5 to 0.26), one series per engine core.

Before the KV cache is profiled its labels hold the text ``None``. ``kv_cache_size_tokens`` came with vLLM 0.2x and is
right where layers differ in their cache; older ones have blocks only. ``num_cpu_blocks`` is a copy in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from thunderagent_operator.probes.plan import Plan, ask_metrics
from thunderagent_operator.probes.reading import Capacity, MetricsPage, largest, product, tokens, total, whole_number

PREFIX: Final = "vllm:"


def probe(page: MetricsPage | None = None) -> Plan:
    """Read the metrics, ``page`` if they are at hand already."""
    return capacity(page or (yield from ask_metrics()))


def capacity(page: MetricsPage) -> Capacity | None:
    """The sum over the engines behind this port. Raises UnreadableError."""
    engines: dict[str, list[Capacity | None]] = {}
    for series in page.series("vllm:cache_config_info"):
        engines.setdefault(series.labels.get("engine", ""), []).append(_of_engine(series.labels))
    # An engine may show the series of before its profiling beside that of after.
    return total(largest(series) for series in engines.values()) if engines else None


def _of_engine(labels: Mapping[str, str]) -> Capacity | None:
    block_size = whole_number(labels.get("block_size"))
    size = tokens(whole_number(labels.get("kv_cache_size_tokens")))
    if size is not None:
        return Capacity(size, block_size)
    return product(whole_number(labels.get("num_gpu_blocks")), block_size)
