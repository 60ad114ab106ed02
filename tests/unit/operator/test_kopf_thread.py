"""A kopf that ends, hangs or fails, in the thread that keeps it running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import kopf
import pytest

from thunderagent_operator import kopf_thread
from thunderagent_operator.kopf_thread import KopfThread, registry

Run = Callable[[int, threading.Event], Awaitable[None]]
LIMIT_SECONDS = 30.0


class Kopf:
    """Stands in for ``kopf.operator``: does what a test says in each of its runs, numbered from 1."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.runs: list[dict[str, Any]] = []

    async def operator(self, *, stop_flag: threading.Event, **given: Any) -> None:
        self.runs.append(given)
        await self._run(len(self.runs), stop_flag)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], Kopf]:
    monkeypatch.setattr(kopf_thread, "RESTART_SECONDS", 0.01)

    def made(run: Run) -> Kopf:
        found = Kopf(run)
        monkeypatch.setattr(kopf, "operator", found.operator)
        return found

    return made


async def until_stopped(_: int, stop: threading.Event) -> None:
    await asyncio.to_thread(stop.wait)


def thread(*namespaces: str, selector: str = "") -> KopfThread:
    return KopfThread("pods", kopf.OperatorRegistry(), namespaces, lambda: selector)


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not reached():  # noqa: ASYNC110 - another thread's
            await asyncio.sleep(0.005)


async def test_it_is_alive_from_start_to_stop(stand_in: Callable[[Run], Kopf]) -> None:
    stand_in(until_stopped)
    kept = thread()
    assert not kept.alive
    kept.start()
    assert kept.alive
    await kept.stop()
    assert not kept.alive
    await kept.stop()
    kept.start()
    assert kept.alive
    await kept.stop()


@pytest.mark.parametrize("failure", [None, RuntimeError("permanent"), PermissionError("403")])
async def test_it_begins_again_whatever_kopf_ends_of(
    stand_in: Callable[[Run], Kopf], caplog: pytest.LogCaptureFixture, failure: Exception | None
) -> None:
    async def run(number: int, stop: threading.Event) -> None:
        if number < 4:
            if failure is not None:
                raise failure
        else:
            await until_stopped(number, stop)

    found, kept = stand_in(run), thread()
    kept.start()
    await until(lambda: len(found.runs) == 4)
    assert kept.alive
    await kept.stop()
    said = [one for one in caplog.records if "it begins again" in one.getMessage() and one.levelname == "WARNING"]
    assert len(said) == (0 if failure is None else 1), "said once, not at each try"


async def test_it_is_stopped_while_it_waits_to_begin_again(
    stand_in: Callable[[Run], Kopf], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kopf_thread, "RESTART_SECONDS", 3600.0)

    async def run(number: int, stop: threading.Event) -> None:
        pass

    found, kept = stand_in(run), thread()
    kept.start()
    await until(lambda: len(found.runs) == 1)
    await kept.stop()
    assert not kept.alive


async def test_one_that_does_not_stop_in_time_is_left_behind(
    stand_in: Callable[[Run], Kopf], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kopf_thread, "STOP_SECONDS", 0.01)
    hanging = threading.Event()

    async def run(number: int, stop: threading.Event) -> None:
        await asyncio.to_thread(hanging.wait if number == 1 else stop.wait)

    found, kept = stand_in(run), thread()
    try:
        kept.start()
        await until(lambda: len(found.runs) == 1)
        await kept.stop()
        kept.start()
        await until(lambda: len(found.runs) == 2)
        assert kept.alive
    finally:
        hanging.set()
    await kept.stop()
    await until(lambda: not any(one.name == "kopf-pods" for one in threading.enumerate()))
    assert len(found.runs) == 2, "the one left behind did not begin again"


@pytest.mark.parametrize(("namespaces", "clusterwide"), [((), True), (("llm",), False), (("llm", "web"), False)])
async def test_kopf_is_told_where_to_look(
    stand_in: Callable[[Run], Kopf], namespaces: tuple[str, ...], clusterwide: bool
) -> None:
    found, kept = stand_in(until_stopped), thread(*namespaces, selector="app=vllm")
    kept.start()
    await until(lambda: len(found.runs) == 1)
    await kept.stop()
    (run,) = found.runs
    assert (run["namespaces"], run["clusterwide"]) == (namespaces, clusterwide)
    settings: kopf.OperatorSettings = run["settings"]
    assert settings.watching.label_selectors["", "v1", "pods"] == "app=vllm"
    assert settings.scanning.disabled, "needs rights that the operator has not"
    assert not settings.posting.enabled
    waits = iter(settings.networking.error_backoffs)  # type: ignore[arg-type]
    assert [next(waits) for _ in range(100)][-1] == 5, "it tries without end"


@pytest.mark.parametrize(
    ("kubeconfig", "account", "chosen"),
    [(True, True, "kubeconfig"), (False, True, "account"), (False, False, "kubeconfig")],
)
async def test_it_logs_in_as_the_operators_own_requests_do(
    monkeypatch: pytest.MonkeyPatch, kubeconfig: bool, account: bool, chosen: str
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    if kubeconfig:
        monkeypatch.setenv("KUBECONFIG", "/home/me/.kube/config")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: "account" if account else None)
    monkeypatch.setattr(kopf, "login_with_kubeconfig", lambda **_: "kubeconfig")
    (login,) = registry()._activities.get_all_handlers()
    assert login.fn() == chosen
