"""Which operator serves the feed and writes statuses: the one that holds the Lease.

Everybody else watches and probes all the same, so that the next leader has nothing to learn when it takes over. The
election is the `kubernetes` library's; here is what it leaves to its user: an API that is away is no reason to die,
leadership that cannot be renewed in time is over, and a leader that shuts down says so, which spares the next one
the wait for the lease to run out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, V1Lease, V1ObjectMeta
from kubernetes.aio.leaderelection import electionconfig, leaderelection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from thunderagent_epp.telemetry import logs

log = logs.logger("operator")

LEASE_SECONDS: Final = 8
RENEW_WITHIN_SECONDS: Final = 5
RETRY_SECONDS: Final = 1
"""A leader that dies is followed after at most the lease and one try: a standby feeds well within 15 s."""

GIVE_UP_SECONDS: Final = 2

_AWAY: Final = (aiohttp.ClientError, OSError, TimeoutError)


class _Lock(LeaseLock):
    """The library's lock, for which an API that is away is one that answers with an error."""

    async def get(self, name: str, namespace: str) -> Any:
        try:
            async with asyncio.timeout(RENEW_WITHIN_SECONDS):
                return await super().get(name, namespace)
        except _AWAY as error:
            return False, ApiException(status=0, reason=f"{type(error).__name__}: {error}")

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        # The library's own asks for a pretty answer in a way that its own validation refuses.
        lease = V1Lease(metadata=V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            async with asyncio.timeout(RENEW_WITHIN_SECONDS):
                self.lease_reference = await self.api_instance.create_namespaced_lease(namespace, lease)
        except ApiException as error:
            log.warning("the lease could not be made", problem=f"{error.status} {error.reason}")
            return False
        except _AWAY:
            return False
        return True

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        try:
            async with asyncio.timeout(RENEW_WITHIN_SECONDS):
                return bool(await super().update(name, namespace, updated_record))
        except _AWAY:
            return False


class Leadership:
    """Competes for the Lease ``namespace/name`` as ``identity``, and says when it is won and lost."""

    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        won: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self._lock = _Lock(name, namespace, identity, api)
        self._won = won
        self._lost = lost
        self.leading = False

    async def run(self) -> None:
        """Compete until cancelled; then give the Lease up if it is held."""
        try:
            while True:
                config = electionconfig.Config(
                    self._lock,
                    lease_duration=LEASE_SECONDS,
                    renew_deadline=RENEW_WITHIN_SECONDS,
                    retry_period=RETRY_SECONDS,
                    onstarted_leading=self._start,
                    onstopped_leading=self._stop,
                )
                await leaderelection.LeaderElection(config).run()
        finally:
            if self.leading:
                await self._stop()
                await self._give_up()

    async def _start(self) -> None:
        log.info("leading", identity=self._lock.identity)
        self.leading = True
        self._won()

    async def _stop(self) -> None:
        log.info("leading no more", identity=self._lock.identity)
        self.leading = False
        self._lost()

    async def _give_up(self) -> None:
        """Take the name off the Lease, so that another operator need not wait for it to run out."""
        lock = self._lock
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS):
                lease = await lock.api_instance.read_namespaced_lease(lock.name, lock.namespace)
                if lease.spec is not None and lease.spec.holder_identity == lock.identity:
                    lease.spec.holder_identity = ""
                    await lock.api_instance.replace_namespaced_lease(lock.name, lock.namespace, lease)
        except (ApiException, *_AWAY) as error:
            log.info("the lease could not be given up; it runs out by itself", problem=str(error).partition("\n")[0])
