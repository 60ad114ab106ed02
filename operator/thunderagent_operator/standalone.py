"""Snapshots for one picker without Kubernetes: what a policy file says, with what its workers say they can hold.

`thunderagent standalone` puts this feed in the place of the file's own. The file is followed as ever; each worker it
gives no capacity for is probed from the moment the file names it, and a probe that tells something else renews the
snapshot. There is nobody here to say that a worker was restarted: its incarnation is its endpoint, and it keeps the
last capacity known until it tells another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

from thunderagent_epp.feed.policy_file import PolicyFile
from thunderagent_epp.feed.static_file import LOOK_INTERVAL_SECONDS, StaticFileFeed
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry.metrics import Metrics
from thunderagent_operator.discovery import Discovered
from thunderagent_operator.probes.http import Address, HttpFetch
from thunderagent_operator.probes.prober import ProbeKey, Prober, ProbeTarget
from thunderagent_operator.telemetry import ProbeMetrics

COALESCE_SECONDS: Final = 0.05
"""The first answers of many workers come within moments: one snapshot for all of them."""


class ProbedFileFeed:
    """Follows one policy file and its workers; to be made in the loop it will run in.

    Raises PolicyFileError when it is made and the file cannot be used, never later.
    """

    def __init__(
        self,
        path: Path,
        publish: Callable[[Snapshot], None],
        metrics: Metrics,
        look_interval_seconds: float = LOOK_INTERVAL_SECONDS,
    ) -> None:
        self._name = str(path)
        self._fetch = HttpFetch()
        self._learnt = asyncio.Event()
        self._prober = Prober(self._fetch, lambda key: self._learnt.set(), ProbeMetrics(metrics.registry))
        self._followed: set[WorkerRank] = set()
        self._file = StaticFileFeed(path, publish, metrics, look_interval_seconds, self._snapshot)

    async def run(self) -> NoReturn:
        """Publish what the file says now, then every change of it and of what its workers can hold, until cancelled."""
        async with self._fetch, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._file.run())
            tasks.create_task(self._prober.run())
            while True:
                await self._learnt.wait()
                await asyncio.sleep(COALESCE_SECONDS)
                self._learnt.clear()
                self._file.renew()

    def _snapshot(self, policy: PolicyFile, snapshot_id: int) -> Snapshot:
        """What the file says, with what is known by now; and from now on exactly its workers are probed."""
        said = policy.snapshot(snapshot_id)
        targets = dict(_targets(policy))
        for gone in self._followed - targets.keys():
            self._prober.forget(ProbeKey(self._name, gone))
        for rank, target in targets.items():
            self._prober.follow(ProbeKey(self._name, rank), target)
        self._followed = set(targets)
        workers = tuple(self._with_capacity(worker, targets.get(worker.id)) for worker in said.capacity.workers)
        return replace(said, capacity=CapacitySnapshot(workers))

    def _with_capacity(self, worker: Worker, target: ProbeTarget | None) -> Worker:
        known = self._prober.known(ProbeKey(self._name, worker.id))
        return Discovered(worker, target).with_capacity(known.capacity)


def _targets(policy: PolicyFile) -> Iterator[tuple[WorkerRank, ProbeTarget]]:
    """The ranks to be probed: those without a capacity in the file, but for engine ``none``."""
    for worker in policy.workers:
        if worker.capacity_tokens is not None or worker.engine == "none":
            continue
        where = worker.metrics
        for rank, (port, endpoint) in enumerate(zip(worker.ports, worker.endpoints(), strict=True)):
            yield (
                WorkerRank(worker.name, rank),
                ProbeTarget(
                    address=Address(worker.host, port, where.path, where.port, where.scheme),
                    incarnation=endpoint,
                    engine=worker.engine,
                    interval_seconds=worker.probe_interval_seconds,
                ),
            )
