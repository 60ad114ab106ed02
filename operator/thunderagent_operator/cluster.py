"""What the API says about policies, InferencePools and pods, and which policies that makes due.

Events and lists come in, from kopf's threads by way of the main loop and from `census.py`; out goes nothing but the
names of policies that have to be looked at again. Level-triggered: an event only replaces what is known of one object,
and a list takes away what is no longer there, so nothing depends on having seen every event or on their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from thunderagent_operator.api import PODS, POLICIES, POOLS, Kind, Listed
from thunderagent_operator.discovery import PodWorkers, UnresolvedError, WorkerSource, pod_workers, worker_source
from thunderagent_operator.resources import InvalidPolicyError, PolicySpec, read_policy
from thunderagent_operator.selectors import PodSelector

Body = Mapping[str, Any]
"""An object as the API gives it."""

_NOBODY: Final = PodWorkers()


@dataclass(slots=True)
class _Object:
    body: Body
    seen_at: float


@dataclass(frozen=True, slots=True)
class Differences:
    """What a list has and the watches have not delivered.

    ``missing`` are unknown objects; ``stale`` those that changed, with the version that is known: for a moment, or
    for ever where a watch has died.
    """

    missing: Collection[str] = ()
    stale: Mapping[str, str] = field(default_factory=dict)


class Policy:
    """One ThunderAgentPolicy, what it selects, and why it cannot be used as it is.

    ``spec`` and ``source`` are the newest that could be used together: a bad edit leaves both, and ``problem`` says so
    as (reason, message).
    """

    def __init__(self, name: str, body: Body) -> None:
        self.name = name
        self.body = body
        self.spec: PolicySpec | None = None
        self.source: WorkerSource | None = None
        self.pool: str | None = None
        """``namespace/name`` of the InferencePool it refers to, there or not."""
        self.problem: tuple[str, str] | None = None
        self.pods: dict[str, PodWorkers] = {}
        """By pod name; pods that are no workers are left out."""

    @property
    def namespace(self) -> str:
        """Where it is, and its workers with it."""
        return self.name.partition("/")[0]

    def read(self, body: Body, pool_of: Callable[[str], Body | None]) -> None:
        """Take the object as it is now, and the pool it refers to."""
        self.body = body
        try:
            spec = read_policy(body)
            pool = spec.workers.inference_pool
            self.pool = None if pool is None else f"{self.namespace}/{pool}"
            self.source = worker_source(spec, None if self.pool is None else pool_of(self.pool))
            self.spec = spec
        except InvalidPolicyError as error:
            self.problem = ("InvalidSpec", str(error))
        except UnresolvedError as error:
            self.problem = (error.reason, str(error))
        else:
            self.problem = None

    def look_at(self, name: str, pod: Body | None) -> bool:
        """Take one pod as it is now, None if it is gone; returns whether that changed anything."""
        found = _NOBODY if pod is None or self.source is None else pod_workers(pod, self.source)
        before = self.pods.get(name, _NOBODY)
        if found == before:
            return False
        if found == _NOBODY:
            del self.pods[name]
        else:
            self.pods[name] = found
        return True


class Cluster:
    """Everything known of the cluster. ``due`` is called with the ``namespace/name`` of a policy to look at again.

    ``clock`` gives seconds that never decrease. Belongs to the main loop.
    """

    def __init__(self, due: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._due = due
        self._clock = clock
        self._objects: dict[Kind, dict[str, _Object]] = {POLICIES: {}, POOLS: {}, PODS: {}}
        self._pods_in: dict[str, dict[str, Body]] = {}
        """Pods by namespace and name."""
        self._policies: dict[str, Policy] = {}
        self._policies_in: dict[str, dict[str, Policy]] = {}

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Every policy by ``namespace/name``."""
        return self._policies

    def selectors(self) -> set[PodSelector]:
        """What the policies select pods by."""
        return {policy.source.selector for policy in self._policies.values() if policy.source is not None}

    def lacks_pools(self) -> bool:
        """Whether a policy refers to an InferencePool that is not there."""
        pools = self._objects[POOLS]
        return any(policy.pool is not None and policy.pool not in pools for policy in self._policies.values())

    def sharing(self, policy: Policy) -> Iterator[Policy]:
        """The other policies of its namespace that have workers."""
        return (other for other in self._policies_in[policy.namespace].values() if other is not policy and other.pods)

    def take(self, kind: Kind, event: str | None, body: Body) -> bool:
        """Take what a watch said of one object; ``event`` None is a list's, ``DELETED`` its end.

        Returns whether a list named what was known already: a watch has begun anew, and may have missed an end.
        """
        metadata = body["metadata"]
        key = f"{metadata['namespace']}/{metadata['name']}"
        known = self._objects[kind].get(key)
        if event == "DELETED":
            if known is not None:
                self._forget(kind, key)
            return False
        kept = _slim(body) if kind is PODS else body
        self._objects[kind][key] = _Object(kept, self._clock())
        self._changed(kind, key, kept)
        return event is None and known is not None

    def compare(self, kind: Kind, listed: Mapping[str, Listed], listed_at: float) -> Differences:
        """Take a list by ``namespace/name``, begun at ``listed_at``: forget what is not in it.

        What was heard of after the list began is left alone.
        """
        objects = self._objects[kind]
        for key, known in list(objects.items()):
            if key not in listed and known.seen_at < listed_at:
                self._forget(kind, key)
        missing, stale = set(), {}
        for key, found in listed.items():
            held = objects.get(key)
            if held is None or held.body["metadata"]["uid"] != found.uid:
                missing.add(key)
            elif (version := held.body["metadata"].get("resourceVersion", "")) != found.version:
                stale[key] = version
        return Differences(missing, stale)

    def _forget(self, kind: Kind, key: str) -> None:
        del self._objects[kind][key]
        self._changed(kind, key, None)

    def _changed(self, kind: Kind, key: str, body: Body | None) -> None:
        if kind is PODS:
            self._pod_changed(key, body)
        elif kind is POOLS:
            namespace = key.partition("/")[0]
            for policy in list(self._policies_in.get(namespace, {}).values()):
                if policy.pool == key:
                    self._read(policy, policy.body)
        elif body is None:
            policy = self._policies.pop(key)
            del self._policies_in[policy.namespace][key]
            self._due(key)
            self._shared(policy.namespace, policy.pods)
        else:
            policy = self._policies.setdefault(key, Policy(key, body))
            self._policies_in.setdefault(policy.namespace, {})[key] = policy
            self._read(policy, body)

    def _read(self, policy: Policy, body: Body) -> None:
        source, before = policy.source, set(policy.pods)
        policy.read(body, self._pool)
        if policy.source != source:
            for name, pod in self._pods_in.get(policy.namespace, {}).items():
                policy.look_at(name, pod)
        self._due(policy.name)
        self._shared(policy.namespace, before.symmetric_difference(policy.pods))

    def _pod_changed(self, key: str, pod: Body | None) -> None:
        namespace, _, name = key.partition("/")
        pods = self._pods_in.setdefault(namespace, {})
        if pod is None:
            pods.pop(name, None)
        else:
            pods[name] = pod
        moved = False
        for policy in self._policies_in.get(namespace, {}).values():
            before = name in policy.pods
            if policy.look_at(name, pod):
                self._due(policy.name)
                moved |= before != (name in policy.pods)
        if moved:
            self._shared(namespace, (name,))

    def _shared(self, namespace: str, pods: Collection[str]) -> None:
        """Some policy has taken or left these pods: whoever else has one may share it with more or fewer now."""
        if pods:
            for policy in self._policies_in[namespace].values():
                if any(name in policy.pods for name in pods):
                    self._due(policy.name)

    def _pool(self, key: str) -> Body | None:
        held = self._objects[POOLS].get(key)
        return None if held is None else held.body


def _slim(pod: Body) -> Body:
    """What `discovery.py` looks at; the rest of thousands of pods is not worth its memory."""
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    kept = ("name", "namespace", "uid", "resourceVersion", "labels", "annotations", "deletionTimestamp")
    return {
        "metadata": {field: metadata[field] for field in kept if field in metadata},
        "spec": {
            "containers": [
                {
                    "name": one["name"],
                    "ports": [{"containerPort": port["containerPort"]} for port in one.get("ports") or ()],
                }
                for one in spec.get("containers") or ()
            ]
        },
        "status": {
            "phase": status.get("phase"),
            "podIP": status.get("podIP"),
            "conditions": [
                {"type": one["type"], "status": one["status"]}
                for one in status.get("conditions") or ()
                if one["type"] == "Ready"
            ],
            "containerStatuses": [
                {"name": one["name"], "restartCount": one.get("restartCount", 0)}
                for one in status.get("containerStatuses") or ()
            ],
        },
    }
