"""Which engine a worker is, where the policy leaves it open: what its label says, else what its metrics show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from thunderagent_operator.probes import llamacpp, sglang, trtllm, vllm
from thunderagent_operator.probes.plan import Plan, ask_metrics
from thunderagent_operator.probes.reading import MetricsPage

PROBES: Final[Mapping[str, Callable[[MetricsPage | None], Plan]]] = {
    "vllm": vllm.probe,
    "sglang": sglang.probe,
    "trtllm": trtllm.probe,
    "llamacpp": llamacpp.probe,
}
"""By the engine's name in a policy."""

_SHOWN_BY: Final[Mapping[str, str]] = {
    vllm.PREFIX: "vllm",
    sglang.PREFIX: "sglang",
    trtllm.PREFIX: "trtllm",
    llamacpp.PREFIX: "llamacpp",
}

_OTHER_NAMES: Final[Mapping[str, str]] = {
    "trtllm-serve": "trtllm",
    "tensorrt-llm": "trtllm",
    "llama.cpp": "llamacpp",
    "llama-cpp": "llamacpp",
    "llama-server": "llamacpp",
}
"""Under which engine labels know an engine as well; llm-d's own is the first."""


def probe_of(engine: str, label: str | None = None) -> Plan:
    """The probe for an engine as a policy names it (not ``none``); ``label`` is the pod's engine label."""
    name = engine if engine in PROBES else named_by(label)
    return PROBES[name](None) if name else _by_what_it_shows()


def named_by(label: str | None) -> str | None:
    """The engine that an engine label names; None for a label that names none of them."""
    name = (label or "").strip().lower()
    return name if name in PROBES else _OTHER_NAMES.get(name)


def _by_what_it_shows() -> Plan:
    page = yield from ask_metrics()
    for prefix, engine in _SHOWN_BY.items():
        if page.shows(prefix):
            # A page may show two, such as that of a proxy beside the engine.
            known = yield from PROBES[engine](page)
            if known is not None:
                return known
    return None
