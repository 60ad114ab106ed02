"""Writes statuses and events: what the reconciler found of each policy, as far as it differs from what is there.

The leader's alone. A policy is patched when its status has changed and at most once a second, so that a busy fleet
costs the API server no more than a quiet one; what could not be written is tried again with what is true by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from thunderagent_epp.telemetry import logs
from thunderagent_operator.api import Api, ApiError, error_text
from thunderagent_operator.cluster import Body, Cluster, Policy
from thunderagent_operator.conditions import Findings, changed, is_bad, policy_status
from thunderagent_operator.status import Condition, PolicyStatus

log = logs.logger("operator")

PATCH_SECONDS: Final = 1.0
"""Between two patches of one policy (kubernetes.md)."""
FAILED_SECONDS: Final = 2.0
SEEN_SECONDS: Final = 5.0
"""What was written so long ago the watch has shown: what it shows now is what is there."""
CONCURRENCY: Final = 4


@dataclass(frozen=True, slots=True)
class _Written:
    uid: str
    status: dict[str, Any]
    at: float


class StatusWriter:
    """Takes findings at any time; writes while it leads. Belongs to the main loop."""

    def __init__(self, api: Api, cluster: Cluster) -> None:
        self._api = api
        self._cluster = cluster
        self._findings: dict[str, Findings] = {}
        self._written: dict[str, _Written] = {}
        """What this leader has written last."""
        self._not_before: dict[str, float] = {}
        self._due: set[str] = set()
        self._woken = asyncio.Event()
        self._leading = False
        self.failures = 0

    def lead(self, leading: bool) -> None:
        """Write from now on, or no longer; a new leader takes nothing for written but what the API shows."""
        self._leading = leading
        self._written.clear()
        self._not_before.clear()
        self._due = set(self._findings) if leading else set()
        self._woken.set()

    def take(self, policy: str, found: Findings | None) -> None:
        """Take what was found of a policy, None when it is gone."""
        if found is None:
            self._findings.pop(policy, None)
            self._written.pop(policy, None)
            self._not_before.pop(policy, None)
            self._due.discard(policy)
            return
        self._findings[policy] = found
        if self._leading:
            self._due.add(policy)
            self._woken.set()

    async def run(self) -> None:
        """Write what is due until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            now = clock()
            ready = [policy for policy in sorted(self._due) if self._not_before.get(policy, 0) <= now]
            self._due.difference_update(ready)
            for start in range(0, len(ready), CONCURRENCY):
                await asyncio.gather(*map(self._write, ready[start : start + CONCURRENCY]))
            self._woken.clear()
            later = [self._not_before.get(policy, 0.0) for policy in self._due]
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(later) - clock()) if later else None):
                    await self._woken.wait()
            if later:
                # What is woken for may be due no sooner than what is waited for: at most one look per tenth.
                await asyncio.sleep(0.1)

    async def _write(self, policy: str) -> None:
        known, found = self._cluster.policies.get(policy), self._findings.get(policy)
        if known is None or found is None or not self._leading:
            return
        before = self._before(policy, known.body)
        conditions = _conditions(before)
        status = policy_status(found, conditions, time.time())
        after = status.to_json()
        if after == before:
            return
        namespace, _, name = policy.partition("/")
        clock = asyncio.get_running_loop().time
        self._not_before[policy] = clock() + PATCH_SECONDS
        try:
            await self._api.patch_status(namespace, name, after)
        except ApiError as error:
            self.failures += 1
            log.warning("status could not be written; it is tried again", policy=policy, problem=error_text(error))
            self._not_before[policy] = clock() + FAILED_SECONDS
            self._due.add(policy)
            return
        self._written[policy] = _Written(known.body["metadata"]["uid"], after, clock())
        await self._record(known, changed(conditions, status.conditions))

    def _before(self, policy: str, body: Body) -> Mapping[str, Any]:
        """The status that is there: what was written just now, which the watch need not have shown yet."""
        written, now = self._written.get(policy), asyncio.get_running_loop().time()
        if written is not None and written.uid == body["metadata"]["uid"] and now - written.at < SEEN_SECONDS:
            return written.status
        return body.get("status") or {}

    async def _record(self, policy: Policy, conditions: Sequence[Condition]) -> None:
        """Record an event for each of these; what the API does not take is lost, the status says it too."""
        try:
            for condition in conditions:
                await self._api.event(
                    policy.body,
                    reason=condition.reason,
                    message=f"{condition.type} is {condition.status}: {condition.message}",
                    warning=is_bad(condition),
                )
        except ApiError as error:
            self.failures += 1
            log.warning("event could not be recorded", policy=policy.name, problem=error_text(error))


def _conditions(status: Mapping[str, Any]) -> Sequence[Condition]:
    """The conditions that are there; a status nobody can read has none."""
    try:
        return PolicyStatus.model_validate(status).conditions
    except ValidationError:
        return ()
