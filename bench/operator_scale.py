"""One operator with 5,000 worker pods and 100 policies: how long it takes, what it costs, how late a change comes.

Everything is real but the GPUs: kube-apiserver and etcd, the operator as a process of its own, a probe over HTTP for
every worker, and one picker's feed per policy, which live in this process and note when a snapshot comes. A change's
time is from sending it to the API server to the snapshot that shows it in the picker.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests.support.kube_api import ADMIN, ASSETS_VARIABLE, missing_assets, running_kube_api

from bench.operator_cluster import CAPACITY_TOKENS, WorkerAnswers, WorkerPod, Writer, client_of, worker_pods
from bench.unavailable import UnavailableError
from thunderagent_epp.feed.operator_feed import OperatorFeed
from thunderagent_epp.feed.wire import Counters
from thunderagent_epp.scheduling.capacity import WorkerRank
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry import logs
from thunderagent_epp.telemetry.status import Gauges
from thunderagent_sim.processes import Child, first_of, running_child

POLICIES = 100
PODS_EACH = 50
QUIET_SECONDS = 10.0
"""Between the last of the start and the first look at an idle operator."""
LIMIT_SECONDS = 120.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

SETTLED_SECONDS_MAX = 30.0
MEMORY_BYTES_MAX = 400e6
IDLE_CORE_MAX = 0.05
CHANGE_SECONDS_MAX = 1.0


class Picker:
    """One policy's picker, as far as the feed is concerned."""

    def __init__(self, policy: str, target: str) -> None:
        self.snapshot: Snapshot | None = None
        self._arrived = asyncio.Event()
        self.feed = OperatorFeed(
            target, policy, "bench_0", self._take, counters=lambda: Counters.of(Gauges()), unready=lambda reason: None
        )

    def _take(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._arrived.set()

    async def until_complete(self, workers: int) -> None:
        """Wait for a snapshot with all workers, live and of known capacity."""
        while self.snapshot is None or sum(self.snapshot.capacity.usable.values()) != workers * CAPACITY_TOKENS:
            await self._next()

    async def until(self, worker: str, live: bool) -> None:
        """Wait for a snapshot in which the worker is live, or is not."""
        while self.snapshot is None or (WorkerRank(worker) in self.snapshot.capacity.live) != live:
            await self._next()

    async def _next(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def memory_bytes(pid: int, field: str) -> int:
    """VmRSS is what it has in memory now, VmHWM the most it ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of all do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def _feed_port(line: str) -> int | None:
    with contextlib.suppress(msgspec.DecodeError):
        entry = msgspec.json.decode(line)
        if isinstance(entry, dict) and entry.get("event") == "operating":
            return int(entry["feed_port"])
    return None


@contextlib.asynccontextmanager
async def running_operator(kubeconfig: Path) -> AsyncIterator[tuple[Child, int]]:
    """The operator and the port of its feed."""
    command = (
        *("/usr/bin/env", f"KUBECONFIG={kubeconfig}", "POD_NAME=operator-0"),
        *(sys.executable, "-P", "-m", "thunderagent_epp.cli", "operator", "--log-format", "json"),
        *("--feed-host", "127.0.0.1", "--feed-port", "0", "--http-host", "127.0.0.1", "--http-port", "0"),
    )
    async with running_child("operator", *command, remedy="see its log") as child:
        yield child, await child.announces(_feed_port, LIMIT_SECONDS)


async def settle(pickers: dict[tuple[str, str], Picker], workers_each: int, writer: Writer) -> tuple[float, float]:
    """Wait until every picker has everything, then until every status says so; the monotonic times of both."""
    async with asyncio.timeout(LIMIT_SECONDS):
        await asyncio.gather(*(picker.until_complete(workers_each) for picker in pickers.values()))
        fed = time.monotonic()
        while not all(_is_programmed(policy, workers_each) for policy in await writer.policies()):  # noqa: ASYNC110
            await asyncio.sleep(0.25)
        return fed, time.monotonic()


def _is_programmed(policy: dict[str, Any], workers: int) -> bool:
    status = policy.get("status") or {}
    conditions = {one["type"]: one["status"] for one in status.get("conditions") or ()}
    return conditions.get("Programmed") == "True" and status["workers"]["capacityKnown"] == workers


async def change_pods(
    pods: list[WorkerPod], pickers: dict[tuple[str, str], Picker], writer: Writer, changes: int
) -> list[float]:
    """Change one pod after the other, each of them twice, and return how late each change came."""
    chance = random.Random(1)
    delays = []
    chosen = chance.sample(pods, min(len(pods), math.ceil(changes / 2)))
    for pod, ready in [(pod, ready) for pod in chosen for ready in (False, True)][:changes]:
        await asyncio.sleep(chance.uniform(0.0, 0.3))
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        sent = time.monotonic()
        async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as tasks:
            tasks.create_task(writer.write_readiness(pod, ready, at))
            await pickers[pod.namespace, pod.policy].until(pod.name, ready)
            delays.append(time.monotonic() - sent)
    return delays


async def run(console: Console, *, seconds: float = 60.0, rounds: int = 200) -> dict[str, Any]:
    """Measure and print the table; ``seconds`` of doing nothing, ``rounds`` changes of one pod."""
    if (why := missing_assets()) is not None:
        raise UnavailableError(
            f"operator-scale: {why}: build both with setup-envtest or from source, "
            f"and run it again with {ASSETS_VARIABLE}=FOLDER"
        )
    logs.configure("error", "console")
    # What else the machine does shows in every number below.
    load = os.getloadavg()[0]
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = await asyncio.get_running_loop().create_server(WorkerAnswers, "0.0.0.0", 0, backlog=1024)
        await stack.enter_async_context(server)
        port = server.sockets[0].getsockname()[1]
        api = await asyncio.to_thread(stack.enter_context, running_kube_api(Path(os.environ[ASSETS_VARIABLE]), folder))
        kubeconfig = api.kubeconfig(ADMIN)
        client = await stack.enter_async_context(client_of(kubeconfig))
        pods = worker_pods(POLICIES, PODS_EACH)
        progress = stack.enter_context(Progress(console=console, transient=True))
        task = progress.add_task("writing policies and pods", total=POLICIES + len(pods))
        writer = Writer(client, lambda: progress.advance(task))
        await writer.create_cluster(pods, port)

        progress.update(task, description="starting the operator", total=None)
        started = time.monotonic()
        child, feed_port = await stack.enter_async_context(running_operator(kubeconfig))
        pid = child.process.pid
        pickers = {
            key: Picker("/".join(key), f"127.0.0.1:{feed_port}")
            for key in dict.fromkeys((pod.namespace, pod.policy) for pod in pods)
        }
        following = await stack.enter_async_context(asyncio.TaskGroup())
        tasks = [following.create_task(picker.feed.run()) for picker in pickers.values()]
        stack.callback(lambda: [task.cancel() for task in tasks])
        try:
            settled = await first_of(settle(pickers, PODS_EACH, writer), child.ended())
            fed, written = (at - started for at in settled)
        except TimeoutError:
            raise child.failure(f"did not settle within {LIMIT_SECONDS:g} s") from None
        start_cpu = cpu_seconds(pid)

        progress.update(task, description="doing nothing")
        await asyncio.sleep(QUIET_SECONDS)
        before, began = cpu_seconds(pid), time.monotonic()
        await asyncio.sleep(seconds)
        idle = (cpu_seconds(pid) - before) / (time.monotonic() - began)

        progress.update(task, description="changing pods", total=rounds)
        delays = await change_pods(pods, pickers, writer, rounds)
        result = {
            "load_average": load,
            "policies": POLICIES,
            "worker_pods": len(pods),
            "fed_seconds": fed,
            "settled_seconds": written,
            "start_cpu_seconds": start_cpu,
            "memory_bytes": memory_bytes(pid, "VmRSS"),
            "memory_peak_bytes": memory_bytes(pid, "VmHWM"),
            "idle_seconds": seconds,
            "idle_core": idle,
            "changes": len(delays),
            "change_seconds": {
                "p50": percentile(delays, 0.5),
                "p99": percentile(delays, 0.99),
                "max": max(delays),
            },
        }
        progress.stop()
        console.print(_table(result))
        return result


def _table(result: dict[str, Any]) -> Table:
    change = result["change_seconds"]
    rows = [
        ("start → every picker has every worker", result["fed_seconds"], SETTLED_SECONDS_MAX, "{:.1f} s"),
        ("start → every status says so", result["settled_seconds"], SETTLED_SECONDS_MAX, "{:.1f} s"),
        ("memory at the end", result["memory_bytes"] / 1e6, MEMORY_BYTES_MAX / 1e6, "{:.0f} MB"),
        ("memory at most", result["memory_peak_bytes"] / 1e6, MEMORY_BYTES_MAX / 1e6, "{:.0f} MB"),
        (f"CPU over {result['idle_seconds']:g} s without a change", 100 * result["idle_core"], 100 * IDLE_CORE_MAX,
         "{:.1f} % of a core"),
        ("one pod's change → picker, median", change["p50"], None, "{:.3f} s"),
        ("one pod's change → picker, 99th percentile", change["p99"], CHANGE_SECONDS_MAX, "{:.3f} s"),
        (f"one pod's change → picker, slowest of {result['changes']}", change["max"], None, "{:.3f} s"),
    ]  # fmt: skip
    table = Table(
        "", "measured", "target", "",
        title=f"One operator, {result['worker_pods']} worker pods probed over HTTP, {result['policies']} policies, "
        f"each with a picker; load average {result['load_average']:.1f} on {os.cpu_count()} cores before it began",
    )  # fmt: skip
    for what, measured, target, unit in rows:
        target_text = "" if target is None else f"< {unit.format(target)}"
        table.add_row(what, unit.format(measured), target_text, _verdict(measured, target))
    return table


def _verdict(measured: float, target: float | None) -> str:
    if target is None:
        return ""
    return "[green]met[/]" if measured < target else "[red]missed[/]"
