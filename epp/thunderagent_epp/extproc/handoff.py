"""How a decode worker is told which worker does the prefill: request headers, set by the picker and by nobody else.

`LlmD`: the routing sidecar of a decode pod asks the pod in ``x-prefiller-host-port`` first; without the header the
decode pod does both. `Dynamo`: workers are named by their instance ids, hashes of their pods' names, and ranks; a
Dynamo frontend in direct mode follows them. Clients that could set any of these headers could send anything anywhere,
so all are taken from every request, whatever the topology (`wire.py`, `envoy_config.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from thunderagent_epp.extproc.turn import NO_HEADERS
from thunderagent_epp.scheduling.capacity import Worker
from thunderagent_epp.scheduling.topology import Handoff

PREFILLER: Final = "x-prefiller-host-port"
WORKER_INSTANCE: Final = "x-dynamo-worker-instance-id"
WORKER_RANK: Final = "x-dynamo-dp-rank"
PREFILL_INSTANCE: Final = "x-dynamo-prefill-instance-id"
PREFILL_RANK: Final = "x-dynamo-prefill-dp-rank"
ROUTING_MODE: Final = "x-dynamo-routing-mode"

HANDOFF_HEADERS: Final = (
    PREFILLER,
    # An llm-d sidecar takes it for the rank to forward to. It is never set here: each rank has its own endpoint.
    "x-data-parallel-host-port",
    WORKER_INSTANCE,
    WORKER_RANK,
    PREFILL_INSTANCE,
    PREFILL_RANK,
    ROUTING_MODE,
    # What Dynamo still takes for the same, from before its headers had a prefix.
    "x-worker-instance-id",
    "x-dp-rank",
    "x-prefill-instance-id",
    "x-prefill-dp-rank",
)
"""Request headers by which one worker is told of another; no client's word for any of them counts."""

_INSTANCE_ID_MASK: Final = (1 << 53) - 1
"""Dynamo keeps ids within what a JSON number holds exactly."""


def handoff_headers(handoff: Handoff, decode: Worker, prefill: Worker | None) -> Mapping[str, str]:
    """The request headers that hand a prefill over to ``decode``; ``prefill`` None: the decode worker does both."""
    if handoff is Handoff.LLM_D:
        return NO_HEADERS if prefill is None else {PREFILLER: prefill.endpoint}
    headers = {
        WORKER_INSTANCE: str(instance_id(decode.id.worker)),
        WORKER_RANK: str(decode.id.rank),
        ROUTING_MODE: "aggregated" if prefill is None else "disaggregated",
    }
    if prefill is not None:
        headers[PREFILL_INSTANCE] = str(instance_id(prefill.id.worker))
        headers[PREFILL_RANK] = str(prefill.id.rank)
    return headers


@lru_cache(maxsize=4096)
def instance_id(pod_name: str) -> int:
    """Dynamo's id of a pod's worker, as its Kubernetes discovery makes it: Rust's hash of the name, 53 bits of it.

    That hash is SipHash-1-3 with zero keys over the bytes of the text and an 0xff that ends it.
    """
    return siphash13(pod_name.encode() + b"\xff") & _INSTANCE_ID_MASK


def siphash13(message: bytes) -> int:
    """SipHash with one compression round, three finalization rounds and zero keys, as a 64-bit number."""
    v0, v1, v2, v3 = 0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573
    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) & 0xFF])
    for start in range(0, len(padded), 8):
        word = int.from_bytes(padded[start : start + 8], "little")
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3 ^ word)
        v0 ^= word
    v2 ^= 0xFF
    for _ in range(3):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


_WORD: Final = (1 << 64) - 1


def _sip_round(v0: int, v1: int, v2: int, v3: int) -> tuple[int, int, int, int]:
    v0 = (v0 + v1) & _WORD
    v2 = (v2 + v3) & _WORD
    v1, v3 = _rotated(v1, 13) ^ v0, _rotated(v3, 16) ^ v2
    v0 = (_rotated(v0, 32) + v3) & _WORD
    v2 = (v2 + v1) & _WORD
    v1, v3 = _rotated(v1, 17) ^ v2, _rotated(v3, 21) ^ v0
    return v0, v1, _rotated(v2, 32), v3


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> 64 - bits) & _WORD
