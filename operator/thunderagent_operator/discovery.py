"""Pods and a policy in, workers out (kubernetes.md, *Workers*). Pure: the handlers hold the pods and the probes.

`worker_source` says once per policy, and per change of its InferencePool, what makes a pod a worker; `pod_workers`
then looks at one pod at a time, so that an event costs one pod whatever the size of the fleet. Nothing a pod's owner
writes in a label or an annotation raises: what cannot be used is ignored and said in ``problems``.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thunderagent_epp.feed.problems import problems
from thunderagent_epp.feed.spec import CAPACITY_TOKENS_MAX, Port
from thunderagent_epp.scheduling.capacity import Role, Worker, WorkerRank
from thunderagent_operator.probes.http import Address
from thunderagent_operator.probes.prober import ProbeTarget
from thunderagent_operator.probes.reading import Capacity
from thunderagent_operator.resources import TARGET_PORTS_MAX, LabelSelector, PolicySpec, WorkersSpec
from thunderagent_operator.selectors import PodSelector

Pod = Mapping[str, Any]
"""A pod as the API gives it."""

ACTIVE_PORTS: Final = "thunderagent.io/active-ports"
CAPACITY_TOKENS: Final = "thunderagent.io/capacity-tokens"
_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"

_ROLES: Final[Mapping[str | None, Role]] = {
    None: Role.DECODE,
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "prefill-decode": Role.BOTH,
    # What llm-d called it before.
    "both": Role.BOTH,
}

BLOCK_SIZE_MAX: Final = 65536
"""Larger ones a probe tells are not believed."""


@dataclass(frozen=True, slots=True)
class WorkerSource:
    """What makes a pod's ports workers. ``role_label`` None: every worker does prefill and decode."""

    selector: PodSelector
    ports: tuple[int, ...]
    terms: WorkersSpec
    role_label: str | None = None


class UnresolvedError(Exception):
    """What a policy refers to is not there or not usable; ``reason`` is that of its condition."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Discovered:
    """One rank as its pod and the policy have it. ``target`` None: its capacity is not asked for."""

    worker: Worker
    target: ProbeTarget | None

    def with_capacity(self, learnt: Capacity | None) -> Worker:
        """The worker with what a probe learnt; a capacity that was given comes before it."""
        if self.target is None or learnt is None:
            return self.worker
        block_size = self.worker.block_size
        if learnt.block_size is not None and learnt.block_size <= BLOCK_SIZE_MAX:
            block_size = learnt.block_size
        return replace(self.worker, capacity_tokens=learnt.tokens, block_size=block_size)


@dataclass(frozen=True, slots=True)
class PodWorkers:
    """The ranks of one pod, none if it is no worker. ``problems``: what its labels and annotations have wrong."""

    ranks: tuple[Discovered, ...] = ()
    problems: tuple[str, ...] = ()


_NO_WORKER: Final = PodWorkers()


class _PoolPort(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    number: Port


class _PoolSpec(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    selector: LabelSelector
    target_ports: list[_PoolPort] = Field(alias="targetPorts", min_length=1, max_length=TARGET_PORTS_MAX)


class _Pool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    spec: _PoolSpec


def worker_source(spec: PolicySpec, pool: Mapping[str, Any] | None = None) -> WorkerSource:
    """What makes a pod a worker of a policy. ``pool`` is the InferencePool it names, None where there is none.

    Raises UnresolvedError when the pool is needed and not usable.
    """
    terms = spec.workers
    role_label = None if spec.disaggregation is None else spec.disaggregation.role_label
    if terms.selector is not None and terms.target_ports is not None:
        return WorkerSource(PodSelector.of(terms.selector), tuple(terms.target_ports), terms, role_label)
    if pool is None:
        raise UnresolvedError(
            "InferencePoolNotFound", f"spec.workers.inferencePool: there is no InferencePool {terms.inference_pool}"
        )
    try:
        found = _Pool.model_validate(dict(pool), by_alias=True).spec
    except ValidationError as error:
        faults = "; ".join(map(str, problems(error, _Pool, dict(pool))))
        raise UnresolvedError("InvalidInferencePool", f"InferencePool {terms.inference_pool}: {faults}") from None
    # A port given twice is one rank, the first.
    ports = tuple(dict.fromkeys(port.number for port in found.target_ports))
    return WorkerSource(PodSelector.of(found.selector), ports, terms, role_label)


def pod_workers(pod: Pod, source: WorkerSource) -> PodWorkers:
    """The workers that one pod is, in the order of their ranks."""
    metadata, status = _mapping(pod, "metadata"), _mapping(pod, "status")
    ip = status.get("podIP")
    if not ip or status.get("phase") != "Running" or not source.selector.matches(_mapping(metadata, "labels")):
        return _NO_WORKER
    name, labels, annotations = metadata["name"], _mapping(metadata, "labels"), _mapping(metadata, "annotations")
    found: list[str] = []
    role = Role.BOTH
    if source.role_label is not None:
        label = labels.get(source.role_label)
        if label not in _ROLES:
            known = "prefill, decode or prefill-decode"
            return PodWorkers(problems=(f"pod {name}: label {source.role_label} must be {known}, not {label!r}",))
        role = _ROLES[label]
    active = _active_ports(name, annotations, found)
    capacity = source.terms.capacity_tokens or _annotated_capacity(name, annotations, found)
    live = metadata.get("deletionTimestamp") is None and _is_ready(status)
    host = f"[{ip}]" if ":" in ip else ip
    ranks = []
    for rank, port in enumerate(source.ports):
        if active is not None and port not in active:
            continue
        worker = Worker(
            id=WorkerRank(name, rank),
            endpoint=f"{host}:{port}",
            capacity_tokens=capacity,
            live=live,
            role=role,
            incarnation=f"{metadata.get('uid', '')}/{_restarts(pod, port)}",
            block_size=source.terms.block_size,
        )
        ranks.append(Discovered(worker, _target(worker, host, port, labels, source.terms)))
    return PodWorkers(tuple(ranks), tuple(found))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Another policy that selects some of the same pods; ``pod`` is the first of them by name."""

    policy: str
    pods: int
    pod: str


def overlaps(pods: Set[str], others: Mapping[str, Set[str]]) -> tuple[Overlap, ...]:
    """The policies among ``others`` that make workers of some of the same pods, by name.

    ``pods`` and ``others`` are the names of pods of one namespace, ``others`` by policy (``namespace/name``).
    """
    shared = ((policy, pods & theirs) for policy, theirs in sorted(others.items()))
    return tuple(Overlap(policy, len(both), min(both)) for policy, both in shared if both)


def _mapping(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of an API object; the API leaves out empty ones."""
    return of.get(name) or {}


def _is_ready(status: Mapping[str, Any]) -> bool:
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions") or ())


def _restarts(pod: Pod, port: int) -> int:
    """How often the container that serves a port was restarted: each time its KV cache was lost."""
    serving = _serving_container(pod, port)
    statuses = _mapping(pod, "status").get("containerStatuses") or ()
    return next((int(one.get("restartCount", 0)) for one in statuses if one.get("name") == serving), 0)


def _serving_container(pod: Pod, port: int) -> str | None:
    """The container that declares the port; where none does, the pod's default one, else the first.

    Sidecars are init containers and not looked at: a proxy before the engine has no KV cache to lose.
    """
    containers = _mapping(pod, "spec").get("containers") or ()
    names = [one["name"] for one in containers]
    for one in containers:
        if any(declared.get("containerPort") == port for declared in one.get("ports") or ()):
            return str(one["name"])
    default = _mapping(_mapping(pod, "metadata"), "annotations").get(_DEFAULT_CONTAINER)
    return default if default in names else next(iter(names), None)


def _active_ports(name: str, annotations: Mapping[str, str], found: list[str]) -> frozenset[int] | None:
    """The ports that are to be used; None for all. Ports of no rank may be among them."""
    text = annotations.get(ACTIVE_PORTS)
    if text is None:
        return None
    ports = set()
    for part in filter(None, map(str.strip, text.split(","))):
        if part.isascii() and part.isdigit() and len(part) <= 5:
            ports.add(int(part))
        else:
            found.append(f"pod {name}: annotation {ACTIVE_PORTS}: {part[:40]!r} is no port")
    return frozenset(ports)


def _annotated_capacity(name: str, annotations: Mapping[str, str], found: list[str]) -> int | None:
    text = annotations.get(CAPACITY_TOKENS)
    if text is None:
        return None
    digits = text.strip()
    if digits.isascii() and digits.isdigit() and len(digits) <= 18 and 1 <= int(digits) <= CAPACITY_TOKENS_MAX:
        return int(digits)
    found.append(
        f"pod {name}: annotation {CAPACITY_TOKENS}: must be a number of tokens of at least 1, not {text[:40]!r}"
    )
    return None


def _target(worker: Worker, host: str, port: int, labels: Mapping[str, str], terms: WorkersSpec) -> ProbeTarget | None:
    if worker.capacity_tokens is not None or terms.engine == "none":
        return None
    return ProbeTarget(
        address=Address(host, port, terms.metrics.path, terms.metrics.port, terms.metrics.scheme),
        incarnation=worker.incarnation,
        live=worker.live,
        engine=terms.engine,
        engine_label=labels.get(terms.engine_label),
        interval_seconds=terms.probe_interval_seconds,
    )
