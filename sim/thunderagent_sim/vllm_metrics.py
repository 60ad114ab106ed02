"""``/metrics`` of a simulated worker, under the names, types and labels of vLLM 0.26.

Read by the operator's probes, as a real worker's are, and by the demo, which takes its cache hit rate from here.
Counters live in the engine alone; they are read when the page is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from thunderagent_sim.engine import Engine, Sequence

_TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_REQUEST_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_LABELS = ("model_name", "engine")
_ENGINE = "0"


class VllmMetrics(Collector):
    """One engine's page. ``started`` tells whether the capacity is known yet; before, vLLM says ``None``."""

    def __init__(self, engine: Engine, model: str, started: Callable[[], bool]) -> None:
        self._engine = engine
        self._label_values = (model, _ENGINE)
        self._started = started
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            _LABELS,
            buckets=_TIME_TO_FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        ).labels(*self._label_values)
        self._request_latency = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Histogram of e2e request latency in seconds.",
            _LABELS,
            buckets=_REQUEST_LATENCY_BUCKETS,
            registry=self._registry,
        ).labels(*self._label_values)

    def observe_finished(self, sequence: Sequence) -> None:
        """Count the times of a sequence that was answered to its end, in engine time."""
        if sequence.first_token_at is not None and sequence.finished_at is not None:
            self._time_to_first_token.observe(sequence.first_token_at - sequence.arrived_at)
            self._request_latency.observe(sequence.finished_at - sequence.arrived_at)

    def page(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what is read from the engine."""
        engine, counters = self._engine, self._engine.counters
        yield self._cache_config()
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", engine.running)
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", engine.waiting)
        yield self._gauge(
            "kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            engine.cache.used / engine.cache.total,
        )
        yield self._counter(
            "prefix_cache_queries",
            "Prefix cache queries, in terms of number of queried tokens.",
            counters.prefix_queries,
        )
        yield self._counter(
            "prefix_cache_hits",
            "Prefix cache hits, in terms of number of cached tokens.",
            counters.prefix_hits,
        )
        yield self._counter(
            "external_prefix_cache_queries",
            "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of "
            "queried tokens.",
            counters.external_queries,
        )
        yield self._counter(
            "external_prefix_cache_hits",
            "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached "
            "tokens.",
            counters.external_hits,
        )
        yield self._counter("num_preemptions", "Cumulative number of preemption from the engine.", counters.preemptions)
        yield self._counter("prompt_tokens", "Number of prefill tokens processed.", counters.prompt)
        yield self._counter("generation_tokens", "Number of generation tokens processed.", counters.generation)
        success = CounterMetricFamily(
            "vllm:request_success", "Count of successfully processed requests.", labels=(*_LABELS, "finished_reason")
        )
        for reason, requests in counters.finished_requests.items():
            success.add_metric((*self._label_values, reason), requests)
        yield success

    def _cache_config(self) -> Metric:
        options = self._engine.options
        started = self._started()
        labels = {
            "block_size": str(options.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "engine": _ENGINE,
            "gpu_memory_utilization": "0.92",
            "kv_cache_size_tokens": str(options.capacity_tokens) if started else "None",
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(options.blocks) if started else "None",
            "num_gpu_blocks_override": "None",
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=tuple(labels)
        )
        family.add_metric(tuple(labels.values()), 1.0)
        return family

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric(self._label_values, value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric(self._label_values, value)
        return family
