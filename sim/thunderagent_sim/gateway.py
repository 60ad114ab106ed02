"""A whole gateway on this machine: simulated workers, the picker, and a real Envoy in front of them.

`demo.py` stands one up for each policy, so that each starts with empty caches, and one for ``--serve``. All parts are
child processes on free loopback ports; the program itself is called again for its own parts, with the interpreter
that runs now. Inside the block a first request has been answered through all of them; a part that ends by itself
shows in `Gateway.watch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NoReturn

import aiohttp
import msgspec
import yaml

from thunderagent_epp.envoy_config import EnvoyOptions
from thunderagent_sim.engine import EngineOptions
from thunderagent_sim.envoy_process import RunningEnvoy, envoy_binary, running_envoy
from thunderagent_sim.processes import Child, PartError, first_of, running_child
from thunderagent_sim.worker_role import WorkerRole

MODEL: Final = "simulated"
WORKERS: Final[Mapping[str, WorkerRole | None]] = {"worker-1": None, "worker-2": None}
DISAGGREGATED_WORKERS: Final[Mapping[str, WorkerRole | None]] = {
    "prefill-1": WorkerRole.PREFILL,
    "prefill-2": WorkerRole.PREFILL,
    "decode-1": WorkerRole.DECODE,
    "decode-2": WorkerRole.DECODE,
}

# Small and slow on purpose: a dozen contexts outgrow the two caches within seconds, and to compute one anew takes
# longer than to answer. The ratios, not the sizes, are those of a real worker.
WORKER_ENGINE: Final = EngineOptions(
    blocks=1280, block_size=16, prefill_tokens_per_second=2500.0, decode_tokens_per_second=100.0
)

_HOST: Final = "127.0.0.1"
_CHILD_READY_WITHIN_SECONDS: Final = 15.0
_FIRST_ANSWER_WITHIN_SECONDS: Final = 10.0
_ASK_AGAIN_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway: base URLs of its parts, ``worker_urls`` by the workers' names."""

    url: str
    picker_url: str
    worker_urls: Mapping[str, str]
    policy_file: Path
    _children: tuple[Child, ...]
    _envoy: RunningEnvoy

    async def watch(self) -> NoReturn:
        """Wait for a part to end by itself. Raises PartError that names it."""
        await first_of(*(child.ended() for child in self._children), self._envoy.ended())
        raise AssertionError("a part that ends raises")


@contextlib.asynccontextmanager
async def running_gateway(admission: Mapping[str, Any], *, disaggregated: bool = False) -> AsyncIterator[Gateway]:
    """Run a gateway under these admission parameters (spelt as in a policy file) for the length of the block.

    ``disaggregated``: with prefill and decode workers of their own, programs retained in both pools.
    Raises PartError when a part is missing or does not come up.
    """
    envoy_binary()  # before anything is started, as it is what may be missing
    async with contextlib.AsyncExitStack() as parts:
        directory = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="thunderagent-demo-")))
        roles = DISAGGREGATED_WORKERS if disaggregated else WORKERS
        workers = {name: await parts.enter_async_context(_worker(name, role)) for name, role in roles.items()}
        worker_urls = {
            name: await worker.announces(read_worker_url, _CHILD_READY_WITHIN_SECONDS)
            for name, worker in workers.items()
        }
        policy_file = directory / "policy.yaml"
        policy_file.write_text(policy_yaml(admission, worker_urls, roles))
        picker = await parts.enter_async_context(_picker(policy_file))
        ports = await picker.announces(read_picker_ports, _CHILD_READY_WITHIN_SECONDS)
        options = EnvoyOptions(
            listen_address=_HOST, listen_port=0, picker_address=_HOST, picker_port=ports.grpc_port, tls=False
        )
        envoy = await parts.enter_async_context(running_envoy(options))
        gateway = Gateway(
            url=envoy.url,
            picker_url=f"http://{_HOST}:{ports.http_port}",
            worker_urls=worker_urls,
            policy_file=policy_file,
            _children=(*workers.values(), picker),
            _envoy=envoy,
        )
        await _first_answer(gateway)
        yield gateway


def policy_yaml(
    admission: Mapping[str, Any], worker_urls: Mapping[str, str], roles: Mapping[str, WorkerRole | None] = WORKERS
) -> str:
    """The policy file of a gateway with these workers."""
    workers: list[dict[str, Any]] = [
        {
            "name": name,
            "address": _HOST,
            "ports": [int(url.rpartition(":")[2])],
            "capacityTokens": WORKER_ENGINE.capacity_tokens,
        }
        for name, url in worker_urls.items()
    ]
    policy: dict[str, Any] = {"admission": dict(admission), "workers": workers}
    for worker in workers:
        if (role := roles.get(worker["name"])) is not None:
            worker["role"] = role.value
            policy |= {"topology": "Disaggregated", "disaggregation": {"retentionPool": "Both"}}
    return yaml.safe_dump(policy, sort_keys=False)


@dataclass(frozen=True, slots=True)
class PickerPorts:
    """Where the picker says it listens."""

    grpc_port: int
    http_port: int


def read_picker_ports(line: str) -> PickerPorts | None:
    """Read the picker's ports from one line of its JSON log; None for any other line."""
    with contextlib.suppress(msgspec.DecodeError):
        entry = msgspec.json.decode(line)
        if isinstance(entry, dict) and entry.get("event") == "listening":
            return PickerPorts(int(entry["grpc_port"]), int(entry["http_port"]))
    return None


def read_worker_url(line: str) -> str | None:
    """Read a simulated worker's address from its announcement; None for any other line."""
    found = re.match(r"simulated worker listening on (\S+)", line)
    return found and found[1]


def _command(*arguments: str | Path) -> tuple[str | Path, ...]:
    """This very program with other arguments; -P keeps the current directory's modules out."""
    return (sys.executable, "-P", "-m", "thunderagent_epp.cli", *arguments)


def _worker(name: str, role: WorkerRole | None) -> AbstractAsyncContextManager[Child]:
    engine = WORKER_ENGINE
    command = _command(
        "simulate-worker",
        *("--host", _HOST, "--port", "0", "--model", MODEL),
        *("--blocks", str(engine.blocks), "--block-size", str(engine.block_size)),
        *("--prefill-tokens-per-second", str(engine.prefill_tokens_per_second)),
        *("--decode-tokens-per-second", str(engine.decode_tokens_per_second)),
        *(() if role is None else ("--role", role.value)),
    )
    return running_child(name, *command, remedy="try it by itself: thunderagent simulate-worker")


def _picker(policy_file: Path) -> AbstractAsyncContextManager[Child]:
    command = _command(
        *("epp", "--policy-file", policy_file, "--host", _HOST, "--plaintext", "--log-format", "json"),
        *("--grpc-port", "0", "--health-port", "0", "--http-port", "0"),
    )
    return running_child("picker", *command, remedy="try it by itself: thunderagent epp --policy-file FILE")


async def _first_answer(gateway: Gateway) -> None:
    """Wait until a request has gone all the way, which says more than any part's own health."""
    said = "nothing"

    async def ask() -> None:
        nonlocal said
        async with aiohttp.ClientSession(gateway.url) as client:
            while True:
                async with client.post("/v1/chat/completions", json=_HELLO) as response:
                    if response.status == HTTPStatus.OK:
                        return
                    said = f"HTTP {response.status} {(await response.text())[:200]}"
                await asyncio.sleep(_ASK_AGAIN_SECONDS)

    try:
        async with asyncio.timeout(_FIRST_ANSWER_WITHIN_SECONDS):
            await first_of(ask(), gateway.watch())
    except TimeoutError:
        raise PartError(
            f"the gateway answered no request within {_FIRST_ANSWER_WITHIN_SECONDS:g} s: {said}"
            " - run it again when this machine is less busy"
        ) from None


_HELLO: Final = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
