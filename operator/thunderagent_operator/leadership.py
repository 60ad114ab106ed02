"""Which operator serves the feed and writes statuses: the one that holds the Lease.

Everybody else watches and probes all the same, so that the next leader has nothing to learn when it takes over. The
election is the `kubernetes` library's; here is what it leaves to its user: an API that is away is no reason to die,
leadership that cannot be renewed in time is over, and a leader that shuts down says so, which spares the next one
the wait for the lease to run out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, V1Lease, V1ObjectMeta
from kubernetes.aio.leaderelection import electionconfig, leaderelection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from thunderagent_epp.telemetry import logs
from thunderagent_operator.api import error_text

log = logs.logger("operator")

# It logs a traceback for each write that another operator was faster with; what matters of it is said here.
logging.getLogger("kubernetes.aio.leaderelection").setLevel(logging.CRITICAL)

LEASE_SECONDS: Final = 8
RENEW_WITHIN_SECONDS: Final = 5
RETRY_SECONDS: Final = 1
"""A leader that dies is followed after at most the lease and one try: a standby feeds well within 15 s. One that lives
and cannot renew leads no more after at most the time to renew and one try: before another may."""

REQUEST_SECONDS: Final = 2
GIVE_UP_SECONDS: Final = 2

_NOT_FOUND: Final = 404
_CONFLICT: Final = 409


class _LostError(Exception):
    """The lease could not be renewed in time."""


class _Lock(LeaseLock):
    """The library's lock, but whatever goes wrong with a request is a try that failed, and the time to renew is kept.

    The library looks at the time between its tries, and a try may take long.
    """

    def __init__(self, name: str, namespace: str, identity: str, api: ApiClient) -> None:
        super().__init__(name, namespace, identity, api)
        self.held_since: float | None = None
        """When the last request that took or renewed the lease was sent, in the loop's time; None: not held."""
        self._problem: str | None = None

    async def get(self, name: str, namespace: str) -> Any:
        limit = self._limit()
        try:
            async with asyncio.timeout_at(limit):
                there, found = await super().get(name, namespace)
        except Exception as error:
            # Not the API's own refusals, which are returned: no network, or a proxy's page for an answer.
            return False, ApiException(status=0, reason=self._failed(error))
        if isinstance(found, ApiException) and found.status != _NOT_FOUND:
            self._failed(found)
        return there, found

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        # The library's own asks for a pretty answer in a way that its own validation refuses.
        lease = V1Lease(metadata=V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        return await self._take(self.api_instance.create_namespaced_lease(namespace, lease))

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        lease = self.lease_reference
        assert lease is not None, "read before"
        lease.spec = self.update_lease(updated_record, lease.spec)
        return await self._take(self.api_instance.replace_namespaced_lease(name, namespace, lease))

    async def _take(self, request: Coroutine[Any, Any, V1Lease]) -> bool:
        sent = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                self.lease_reference = await request
        except Exception as error:
            if not isinstance(error, ApiException) or error.status != _CONFLICT:
                self._failed(error)
            return False
        self.held_since, self._problem = sent, None
        return True

    def _limit(self) -> float:
        """Until when a try may go on. Raises _LostError when the lease had to be renewed by now."""
        now = asyncio.get_running_loop().time()
        if self.held_since is None:
            return now + REQUEST_SECONDS
        if now >= self.held_since + RENEW_WITHIN_SECONDS:
            raise _LostError
        return min(now + REQUEST_SECONDS, self.held_since + RENEW_WITHIN_SECONDS)

    def _failed(self, error: Exception) -> str:
        """Say once what is wrong with the lease."""
        problem = error_text(error)
        if problem != self._problem:
            log.warning("the lease cannot be had; it is tried again", problem=problem)
        self._problem = problem
        return problem


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
                try:
                    await leaderelection.LeaderElection(config).run()
                except _LostError:
                    await self._stop()
        finally:
            held = self._lock.held_since is not None
            if self.leading:
                await self._stop()
            if held:
                await self._give_up()

    async def _start(self) -> None:
        log.info("leading", identity=self._lock.identity)
        self.leading = True
        self._won()

    async def _stop(self) -> None:
        log.info("leading no more", identity=self._lock.identity)
        self.leading = False
        self._lock.held_since = None
        self._lost()

    async def _give_up(self) -> None:
        """Take the name off the Lease, so that another operator need not wait for it to run out."""
        lock = self._lock
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS):
                while True:
                    lease = await lock.api_instance.read_namespaced_lease(lock.name, lock.namespace)
                    if lease.spec is None or lease.spec.holder_identity != lock.identity:
                        return
                    lease.spec.holder_identity = ""
                    try:
                        await lock.api_instance.replace_namespaced_lease(lock.name, lock.namespace, lease)
                    except ApiException as error:
                        # The last renewal may have been under way when this one was stopped.
                        if error.status != _CONFLICT:
                            raise
                    else:
                        return
        except (ApiException, aiohttp.ClientError, OSError, TimeoutError) as error:
            log.info("the lease could not be given up; it runs out by itself", problem=error_text(error))
