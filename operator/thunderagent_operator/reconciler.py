"""Looks at policies that are due: from the cluster and the probes to a snapshot in the feed and a status.

Everything that may matter to a policy (an object, a probe, a picker) only marks it as due; here it is looked at whole,
so it does not matter what it was or how often. Every operator does this, leading or not: one that takes over has the
snapshots ready. Writing statuses is the leader's alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.scheduling.topology import Disaggregation
from thunderagent_epp.telemetry import logs
from thunderagent_operator.cluster import Cluster, Policy
from thunderagent_operator.conditions import Findings, timestamp
from thunderagent_operator.discovery import Discovered, Overlap, overlaps
from thunderagent_operator.feed import FeedServer, Picker
from thunderagent_operator.probes.prober import ProbeKey, Prober
from thunderagent_operator.resources import PolicySpec
from thunderagent_operator.snapshot_book import Published
from thunderagent_operator.status import PublishedSnapshot

log = logs.logger("operator")

COALESCE_SECONDS: Final = 0.05
"""A rollout, or a first list, changes many pods at once: one look for all of them."""

FIRST_PROBES_SECONDS: Final = 3.0
"""For the first answers of a policy's workers before it is published the first time. Without this wait, a restart of
the operator would take the capacities it has not yet learnt anew from every picker."""


APPLIED_WITHIN_SECONDS: Final = 1.0
"""For pickers to put a new snapshot in force, before it is reported that they lag. Without this wait, each change of a
pod would be two events: that they lag, and that they do not."""


class Reconciler:
    """Keeps feed and prober in line with the cluster. ``reported`` gets a policy's findings, None when it is gone."""

    def __init__(
        self,
        cluster: Cluster,
        prober: Prober,
        feed: FeedServer,
        *,
        pods_are_known: Callable[[Policy], bool],
        reported: Callable[[str, Findings | None], None],
    ) -> None:
        self._cluster = cluster
        self._prober = prober
        self._feed = feed
        self._pods_are_known = pods_are_known
        self._reported = reported
        self._due: set[str] = set()
        self._woken = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._probed: dict[str, set[WorkerRank]] = {}
        self._first_seen: dict[str, float] = {}
        """When the pods of a policy without a snapshot were known, in the loop's time."""
        self._lag_since: dict[str, float] = {}

    def due(self, policy: str) -> None:
        """Look at a policy again, soon."""
        self._due.add(policy)
        self._woken.set()
        self._settled.clear()

    async def settled(self) -> None:
        """Wait until every policy that can be published is."""
        await self._settled.wait()

    async def run(self) -> None:
        """Look at what is due until cancelled."""
        while True:
            await self._woken.wait()
            await asyncio.sleep(COALESCE_SECONDS)
            self._woken.clear()
            due, self._due = sorted(self._due), set()
            for name in due:
                try:
                    self._look(name)
                except Exception:
                    # One policy's trouble must not become that of all others.
                    log.exception("policy could not be looked at", policy=name)
                # A first list makes everything due at once; the feed and the probes go on meanwhile.
                await asyncio.sleep(0)
            if not self._due and not self._first_seen:
                self._settled.set()

    def _look(self, name: str) -> None:
        policy = self._cluster.policies.get(name)
        if policy is None:
            self._probe(name, {})
            self._first_seen.pop(name, None)
            self._lag_since.pop(name, None)
            self._feed.delete(name)
            self._reported(name, None)
            return
        discovered = [rank for pod in policy.pods.values() for rank in pod.ranks]
        self._probe(name, {rank.worker.id: rank for rank in discovered})
        workers, trouble = self._with_capacity(name, discovered)
        if policy.problem is not None:
            self._feed.withhold(name, policy.problem[1])
        if policy.spec is not None and policy.source is not None and self._may_publish(policy, workers, trouble):
            spec = policy.spec
            self._feed.publish(
                name, CapacitySnapshot(tuple(workers)), spec.admission, spec.requests.policy(), _disaggregation(spec)
            )
        standing, pickers = self._feed.standing(name), self._feed.pickers(name)
        if isinstance(standing, Published) and self._lags_for_a_moment(name, pickers):
            return
        self._reported(
            name,
            Findings(
                generation=policy.body["metadata"].get("generation"),
                problem=policy.problem,
                overlaps=self._overlaps(policy),
                notes=[note for _, pod in sorted(policy.pods.items()) for note in pod.problems],
                workers=workers,
                trouble=trouble,
                snapshot=_published(standing) if isinstance(standing, Published) else None,
                pickers=pickers,
            ),
        )

    def _lags_for_a_moment(self, name: str, pickers: Collection[Picker]) -> bool:
        """Whether some picker has not said yet what it makes of the snapshot, and may take a moment more."""
        if all(picker.current or picker.refusal is not None for picker in pickers):
            self._lag_since.pop(name, None)
            return False
        loop = asyncio.get_running_loop()
        waited = loop.time() - self._lag_since.setdefault(name, loop.time())
        if waited >= APPLIED_WITHIN_SECONDS:
            return False
        loop.call_later(APPLIED_WITHIN_SECONDS - waited, self.due, name)
        return True

    def _probe(self, name: str, ranks: dict[WorkerRank, Discovered]) -> None:
        """Have exactly these probed for the policy."""
        targets = {worker: rank.target for worker, rank in ranks.items() if rank.target is not None}
        for worker in self._probed.get(name, set()) - targets.keys():
            self._prober.forget(ProbeKey(name, worker))
        for worker, target in targets.items():
            self._prober.follow(ProbeKey(name, worker), target)
        if targets:
            self._probed[name] = set(targets)
        else:
            self._probed.pop(name, None)

    def _with_capacity(self, name: str, ranks: list[Discovered]) -> tuple[list[Worker], dict[Worker, str]]:
        workers, trouble = [], {}
        for rank in ranks:
            known = self._prober.known(ProbeKey(name, rank.worker.id))
            worker = rank.with_capacity(known.capacity)
            workers.append(worker)
            if rank.target is not None and known.trouble is not None:
                trouble[worker] = known.trouble
        return workers, trouble

    def _may_publish(self, policy: Policy, workers: list[Worker], trouble: dict[Worker, str]) -> bool:
        """Whether enough is known; a policy that has a snapshot is always brought up to date."""
        if isinstance(self._feed.standing(policy.name), Published):
            return True
        loop = asyncio.get_running_loop()
        if not self._pods_are_known(policy):
            self._first_seen[policy.name] = loop.time()
            return False
        waited = loop.time() - self._first_seen.setdefault(policy.name, loop.time())
        probed = self._probed.get(policy.name, set())
        silent = any(
            worker.live and worker.id in probed and worker.capacity_tokens is None and worker not in trouble
            for worker in workers
        )
        if silent and waited < FIRST_PROBES_SECONDS:
            loop.call_later(FIRST_PROBES_SECONDS - waited, self.due, policy.name)
            return False
        del self._first_seen[policy.name]
        return True

    def _overlaps(self, policy: Policy) -> tuple[Overlap, ...]:
        return overlaps(policy.pods.keys(), {other.name: other.pods.keys() for other in self._cluster.sharing(policy)})


def _disaggregation(spec: PolicySpec) -> Disaggregation | None:
    return None if spec.disaggregation is None else spec.disaggregation.terms()


def _published(standing: Published) -> PublishedSnapshot:
    return PublishedSnapshot(
        id=standing.applied.id,
        contentHash=standing.applied.content_hash,
        publishedAt=timestamp(standing.published_at),
    )
