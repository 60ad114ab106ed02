from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import virtual_time
from kubernetes.aio.client import ApiException, V1Lease
from kubernetes.aio.leaderelection import leaderelection

from thunderagent_operator.leadership import LEASE_SECONDS, RETRY_SECONDS, Leadership


def refusal(status: int) -> ApiException:
    error = ApiException(status=status, reason="Refused")
    error.body = f'{{"code": {status}}}'
    return error


class Leases:
    """One Lease as the API keeps it: a write goes through only on what was read last."""

    def __init__(self) -> None:
        self.lease: V1Lease | None = None
        self.version = 0
        self.problem: Exception | None = None
        self.write_problem: Exception | None = None
        self.seconds = 0.0
        self.writes = 0

    async def read_namespaced_lease(self, name: str, namespace: str) -> V1Lease:
        await self._answer()
        if self.lease is None:
            raise refusal(404)
        return copy.deepcopy(self.lease)

    async def create_namespaced_lease(self, namespace: str, body: V1Lease) -> V1Lease:
        await self._answer()
        if self.lease is not None:
            raise refusal(409)
        return self._put(body)

    async def replace_namespaced_lease(self, name: str, namespace: str, body: V1Lease) -> V1Lease:
        await self._answer()
        if self.write_problem is not None:
            raise self.write_problem
        assert body.metadata is not None
        if body.metadata.resource_version != str(self.version):
            raise refusal(409)
        return self._put(body)

    @property
    def holder(self) -> str | None:
        return None if self.lease is None or self.lease.spec is None else self.lease.spec.holder_identity

    async def _answer(self) -> None:
        await asyncio.sleep(self.seconds)
        if self.problem is not None:
            raise self.problem

    def _put(self, body: V1Lease) -> V1Lease:
        self.version += 1
        self.writes += 1
        self.lease = copy.deepcopy(body)
        assert self.lease.metadata is not None
        self.lease.metadata.resource_version = str(self.version)
        return copy.deepcopy(self.lease)


class Candidate:
    """An operator that competes, and when it won and lost. ``leases`` may be replaced: another way to the API."""

    def __init__(self, name: str, leases: Leases) -> None:
        self.changes: list[tuple[str, float]] = []
        self.leadership = Leadership(
            None,  # type: ignore[arg-type]
            "thunderagent",
            "thunderagent-operator",
            name,
            won=lambda: self._note("won"),
            lost=lambda: self._note("lost"),
        )
        self.leases = leases
        self.leadership._lock.api_instance = self  # type: ignore[assignment]
        self.running = asyncio.create_task(self.leadership.run())

    def __getattr__(self, request: str) -> Any:
        return getattr(self.leases, request)

    def _note(self, what: str) -> None:
        self.changes.append((what, asyncio.get_running_loop().time()))

    def when(self, what: str) -> float:
        (found,) = (when for change, when in self.changes if change == what)
        return found

    def kill(self) -> None:
        """End it without a word."""
        self.leases = Leases()
        self.leases.problem = aiohttp.ClientConnectionError("it is dead")

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.wait((self.running,))
        assert self.running.cancelled()


Tale = Callable[[Leases], Awaitable[None]]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tale], None]:
    """Let a tale happen in no time; the library's wall clock goes with the loop's."""

    class Wall:
        @staticmethod
        def time() -> float:
            return 1_767_268_800.000_001 + asyncio.get_running_loop().time()

    monkeypatch.setattr(leaderelection, "time", Wall)

    def run(tale: Tale) -> None:
        async def told() -> None:
            await tale(Leases())

        virtual_time.run(told())

    return run


def test_the_first_one_leads_and_the_others_stand_by(tell: Callable[[Tale], None]) -> None:
    async def tale(leases: Leases) -> None:
        first, second = Candidate("first", leases), Candidate("second", leases)
        await asyncio.sleep(60)
        assert (first.changes, second.changes) == ([("won", 0.0)], [])
        assert leases.holder == "first"
        assert first.leadership.leading
        assert not second.leadership.leading
        await second.end()
        assert leases.holder == "first", "it was not held by the second"
        await first.end()

    tell(tale)


def test_one_that_ends_gives_the_lease_up_and_another_has_it_with_its_next_try(tell: Callable[[Tale], None]) -> None:
    async def tale(leases: Leases) -> None:
        first, second = Candidate("first", leases), Candidate("second", leases)
        await asyncio.sleep(10.5)
        await first.end()
        assert first.when("lost") == 10.5
        assert leases.holder == ""
        await asyncio.sleep(RETRY_SECONDS)
        assert second.when("won") <= 10.5 + RETRY_SECONDS
        await second.end()

    tell(tale)


def test_one_that_dies_is_followed_when_its_lease_has_run_out(tell: Callable[[Tale], None]) -> None:
    async def tale(leases: Leases) -> None:
        first, second = Candidate("first", leases), Candidate("second", leases)
        await asyncio.sleep(10.5)
        first.kill()
        await asyncio.sleep(15)
        assert 10.5 + LEASE_SECONDS - 1 <= second.when("won") <= 10.5 + LEASE_SECONDS + RETRY_SECONDS
        await second.end()
        await first.end()

    tell(tale)


@pytest.mark.parametrize(
    ("problem", "seconds"),
    [
        (aiohttp.ClientConnectionError("refused"), 0.0),
        (TimeoutError(), 1.9),
        (None, 3600.0),
        (refusal(500), 0.0),
        (refusal(403), 0.5),
        (ValueError("a proxy's page for an answer"), 0.0),
    ],
)
def test_one_that_cannot_renew_leads_no_more_before_another_may(
    tell: Callable[[Tale], None], problem: Exception | None, seconds: float
) -> None:
    async def tale(leases: Leases) -> None:
        first, second = Candidate("first", leases), Candidate("second", leases)
        await asyncio.sleep(10.5)
        cut_off = Leases()
        cut_off.problem, cut_off.seconds = problem, seconds
        first.leases = cut_off
        await asyncio.sleep(30)
        assert first.when("lost") < second.when("won")
        assert not first.leadership.leading
        first.leases = leases
        await asyncio.sleep(30)
        assert not first.leadership.leading, "the second holds it"
        await second.end()
        await asyncio.sleep(2)
        assert first.leadership.leading
        await first.end()

    tell(tale)


def test_a_short_absence_of_the_api_costs_nobody_the_lease(tell: Callable[[Tale], None]) -> None:
    async def tale(leases: Leases) -> None:
        first, second = Candidate("first", leases), Candidate("second", leases)
        await asyncio.sleep(10.5)
        leases.problem = aiohttp.ClientConnectionError("refused")
        await asyncio.sleep(3)
        leases.problem = None
        await asyncio.sleep(30)
        assert (first.changes, second.changes) == ([("won", 0.0)], [])
        await first.end()
        await second.end()

    tell(tale)


def test_a_lease_that_was_deleted_is_made_again(tell: Callable[[Tale], None]) -> None:
    async def tale(leases: Leases) -> None:
        first = Candidate("first", leases)
        await asyncio.sleep(5)
        leases.lease = None
        await asyncio.sleep(5)
        assert leases.holder == "first"
        assert first.changes == [("won", 0.0)]
        await first.end()

    tell(tale)


def test_one_that_may_not_write_the_lease_says_so_once(
    tell: Callable[[Tale], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def tale(leases: Leases) -> None:
        first = Candidate("first", leases)
        await asyncio.sleep(2)
        await first.end()
        caplog.clear()
        leases.write_problem = refusal(403)
        second = Candidate("second", leases)
        await asyncio.sleep(30)
        assert second.changes == []
        await second.end()

    tell(tale)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert "403 Refused" in said


def test_a_container_that_is_restarted_under_its_name_leads_at_once(tell: Callable[[Tale], None]) -> None:
    async def tale(leases: Leases) -> None:
        first = Candidate("pod", leases)
        await asyncio.sleep(5)
        first.kill()
        again = Candidate("pod", leases)
        await asyncio.sleep(0.1)
        assert again.when("won") == 5.0
        await again.end()
        await first.end()

    tell(tale)


def test_a_lease_whose_renewal_was_under_way_is_given_up_all_the_same(tell: Callable[[Tale], None]) -> None:
    async def tale(leases: Leases) -> None:
        first = Candidate("first", leases)
        await asyncio.sleep(5.5)
        replace, conflicts = leases.replace_namespaced_lease, [refusal(409)]

        async def late(name: str, namespace: str, body: V1Lease) -> V1Lease:
            if conflicts:
                raise conflicts.pop()
            return await replace(name, namespace, body)

        leases.replace_namespaced_lease = late  # type: ignore[method-assign]
        await first.end()
        assert leases.holder == ""

    tell(tale)


def test_one_that_ends_while_the_api_is_away_does_not_wait_for_it(tell: Callable[[Tale], None]) -> None:
    async def tale(leases: Leases) -> None:
        first = Candidate("first", leases)
        await asyncio.sleep(5.5)
        leases.seconds = 3600
        await first.end()
        assert asyncio.get_running_loop().time() <= 8.0

    tell(tale)
