"""Requests a second of one picker process through Envoy, against a bare ext_proc server that decides nothing.

Both run at once, each behind an Envoy of its own, and are loaded in turn for a few seconds at a time by the same
closed-loop client; so whatever else the machine does hits both alike. The worker behind them answers at once with a
fixed text, which leaves the picker as what limits. What counts is the ratio; CPU per request is shown beside it
because it does not depend on what the other core was doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from thunderagent_epp.envoy_config import EnvoyOptions
from thunderagent_sim.envoy_process import running_envoy

CONNECTIONS = 32
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Shape:
    """What one request and its answer look like; sizes in bytes, ``events`` is 0 for an answer in one piece."""

    name: str
    prompt_bytes: int
    events: int

    def request(self, session: int, *, port: int) -> bytes:
        content = {"model": "m", "messages": [{"role": "user", "content": "x" * self.prompt_bytes}]}
        body = json.dumps(content | ({"stream": True} if self.events else {})).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
            f"x-session-id: bench-{session}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def answer(self) -> list[bytes]:
        """The worker's answer in the pieces in which it is written."""
        usage = {"prompt_tokens": 500, "completion_tokens": max(1, self.events), "total_tokens": 500 + self.events}
        if not self.events:
            body = json.dumps({"object": "chat.completion", "choices": [{"message": {"content": "y" * 400}}],
                               "usage": usage}).encode()  # fmt: skip
            return [f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                    + body]  # fmt: skip
        event = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "word "}}]}
        texts = [f"data: {json.dumps(event)}\n\n" for _ in range(self.events)]
        texts += [f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n", "data: [DONE]\n\n"]
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        return [head, *(f"{len(text):x}\r\n{text}\r\n".encode() for text in texts), b"0\r\n\r\n"]


SHAPES = (Shape("short turn", 2_000, 0), Shape("long turn", 200_000, 0), Shape("streamed turn", 20_000, 50))


class Worker(asyncio.Protocol):
    """Answers every request with the same bytes; it only looks for where a request ends."""

    shape = SHAPES[0]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._received = bytearray()
        self._answering: set[asyncio.Future[None]] = set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := _end_of_message(self._received)) is not None:
            del self._received[:end]
            task = asyncio.ensure_future(self._answer())
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self) -> None:
        for piece in Worker.shape.answer():
            self._transport.write(piece)
            await asyncio.sleep(0)


def _end_of_message(received: bytearray) -> int | None:
    head = received.find(b"\r\n\r\n")
    if head < 0:
        return None
    length = re.search(rb"(?i)content-length: *(\d+)", received[:head])
    if length is not None:
        end = head + 4 + int(length[1])
        return end if len(received) >= end else None
    last = received.find(b"0\r\n\r\n", head + 4)
    return None if last < 0 else last + 5


@contextlib.asynccontextmanager
async def running_worker() -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(Worker, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def child(*command: str, port_in: str) -> AsyncIterator[tuple[int, int]]:
    """Run a server until the block ends; gives its process id and the port in its first matching line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        assert process.stdout is not None
        while (line := (await process.stdout.readline()).decode()) and not (found := re.search(port_in, line)):
            pass
        if not line:
            raise RuntimeError(f"{command[0]} ended before it listened")
        yield process.pid, int(found[1])
    finally:
        process.kill()
        await process.wait()


async def load(port: int, shape: Shape, seconds: float) -> int:
    """Requests answered within ``seconds`` by as many sessions as there are connections, each one turn at a time."""
    until = time.perf_counter() + seconds
    answered = 0

    async def session(number: int) -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = shape.request(number, port=port)
        try:
            while time.perf_counter() < until:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"not answered: {head.decode(errors='replace')}")
                if length := re.search(rb"(?i)content-length: *(\d+)", head):
                    await reader.readexactly(int(length[1]))
                else:
                    await reader.readuntil(b"0\r\n\r\n")
                answered += time.perf_counter() < until
        finally:
            writer.close()

    async with asyncio.TaskGroup() as sessions:
        for number in range(CONNECTIONS):
            sessions.create_task(session(number))
    return answered


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def summary(shape: Shape, rates: Mapping[str, Sequence[float]], costs: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """One row: medians over the rounds, and the ratio of the two rates beside which it is printed."""
    requests_per_second = {name: statistics.median(each) for name, each in rates.items()}
    return {
        "shape": shape.name,
        "requests_per_second": requests_per_second,
        "cpu_microseconds": {name: statistics.median(each) for name, each in costs.items()},
        "ratio": requests_per_second["epp"] / requests_per_second["bare"],
    }


async def run(console: Console, *, seconds: float = 3.0, rounds: int = 5) -> dict[str, Any]:
    """Measure every shape and print the table."""
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(running_worker())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        policy = folder / "policy.yaml"
        policy.write_text(f"workers: [{{name: w, address: 127.0.0.1, ports: [{worker}], capacityTokens: 100000000}}]\n")
        pickers = {
            "bare": await stack.enter_async_context(
                child(
                    str(Path(__file__).with_name("bare_picker.py")),
                    *("--destination", f"127.0.0.1:{worker}"),
                    port_in=r"(\d+)\s*$",
                )
            ),
            "epp": await stack.enter_async_context(
                child(
                    *("-m", "thunderagent_epp.cli", "epp", "--policy-file", str(policy), "--plaintext"),
                    *("--host", "127.0.0.1", "--grpc-port", "0", "--health-port", "0", "--http-port", "0"),
                    *("--log-format", "json"),
                    port_in=r'"grpc_port": (\d+)',
                )
            ),
        }
        gateways = {
            name: await stack.enter_async_context(
                running_envoy(EnvoyOptions(listen_address="127.0.0.1", listen_port=0, picker_port=port, tls=False))
            )
            for name, (_, port) in pickers.items()
        }
        results = []
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("measuring", total=len(SHAPES) * rounds * len(pickers))
            for shape in SHAPES:
                Worker.shape = shape
                rates: dict[str, list[float]] = {name: [] for name in pickers}
                costs: dict[str, list[float]] = {name: [] for name in pickers}
                for gateway in gateways.values():
                    await load(gateway.port, shape, 0.5)  # connections, caches, the first garbage collections
                for _ in range(rounds):
                    for name, (pid, _port) in pickers.items():
                        before = cpu_seconds(pid)
                        answered = await load(gateways[name].port, shape, seconds)
                        rates[name].append(answered / seconds)
                        costs[name].append(1e6 * (cpu_seconds(pid) - before) / answered)
                        progress.advance(task)
                results.append(summary(shape, rates, costs))
        table = Table(
            "shape", "bare, req/s", "EPP, req/s", "EPP / bare", "bare, CPU µs/req", "EPP, CPU µs/req",
            title=f"One picker process through Envoy, {CONNECTIONS} sessions, medians of {rounds} × {seconds:g} s",
        )  # fmt: skip
        for result in results:
            rate, cost = result["requests_per_second"], result["cpu_microseconds"]
            table.add_row(
                result["shape"], f"{rate['bare']:.0f}", f"{rate['epp']:.0f}", f"{result['ratio']:.2f}",
                f"{cost['bare']:.0f}", f"{cost['epp']:.0f}",
            )  # fmt: skip
        console.print(table)
        return {"seconds": seconds, "rounds": rounds, "connections": CONNECTIONS, "shapes": results}
