"""The HTTP port for people, Prometheus and probes: ``/metrics``, ``/healthz``, ``/readyz``, ``/state``.

It only prints what it is handed: the process starts one, the director answers what is asked. Requests of clients
never come here, and session ids are shown as given, so the port belongs inside the cluster.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Final

import msgspec
from aiohttp import web
from prometheus_client.exposition import choose_encoder

from thunderagent_epp import __version__
from thunderagent_epp.telemetry import logs
from thunderagent_epp.telemetry.metrics import Metrics
from thunderagent_epp.telemetry.status import Readiness, Status

PAGES: Final = {
    "/metrics": "Prometheus metrics, OpenMetrics when asked for",
    "/healthz": "200 while the process answers",
    "/readyz": "200 when requests are taken, else 503 and the reason",
    "/state": "policy, snapshot, workers, programs and what waits, as JSON",
}

_SHUTDOWN_SECONDS: Final = 1.0
"""Scrapers keep their connections open; nobody loses anything when they are closed."""

log = logs.logger("telemetry")

# Sorted keys, as replay prints them.
_encoder = msgspec.json.Encoder(order="sorted")


class StatusServer:
    """Serves one process's telemetry. `start` and `stop` are each called once, on one loop."""

    def __init__(self, metrics: Metrics, status: Callable[[], Status], readiness: Callable[[], Readiness]) -> None:
        self._metrics = metrics
        self._status = status
        self._readiness = readiness
        app = web.Application(middlewares=[_errors_in_json])
        app.add_routes(
            [
                web.get("/", self._index),
                web.get("/metrics", self._exposition),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/state", self._state),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)

    async def start(self, host: str = "", port: int = 9090) -> int:
        """Listen, on every interface when ``host`` is empty, and return the port; 0 takes a free one.

        Raises OSError when the address cannot be had.
        """
        listener = _listen(host, port)
        try:
            await self._runner.setup()
            await web.SockSite(self._runner, listener).start()
        except BaseException:
            listener.close()
            raise
        bound: int = listener.getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Close the port and every connection; safe when `start` failed."""
        await self._runner.cleanup()

    async def _index(self, _: web.Request) -> web.Response:
        lines = [
            f"ThunderAgent endpoint picker {__version__}",
            "",
            *(f"{path:10} {text}" for path, text in PAGES.items()),
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _exposition(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return web.Response(body=encode(self._metrics.registry), headers={"content-type": content_type})

    async def _healthz(self, _: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _readyz(self, _: web.Request) -> web.Response:
        readiness = self._readiness()
        ready = readiness is Readiness.OK
        return _json({"ready": ready, "reason": readiness}, status=200 if ready else 503)

    async def _state(self, _: web.Request) -> web.Response:
        return _json(state_answer(self._status()))


def state_answer(status: Status) -> dict[str, Any]:
    """What `/state` says, as a mapping ready for JSON; unknown is None."""
    state = status.state
    return {
        "ready": status.readiness is Readiness.OK,
        "reason": status.readiness,
        "policy": status.policy,
        "snapshot": None if status.snapshot is None else asdict(status.snapshot),
        "holds": status.holds,
        "held_bytes": status.held_bytes,
        "workers": status.workers,
        "programs": state.programs,
        "used": state.used,
        "waiting": state.waiting,
        "tracked": state.tracked,
    }


def _json(answer: object, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(answer) + b"\n", status=status, content_type="application/json")


@web.middleware
async def _errors_in_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPException as error:
        answer = _json({"error": f"{error.reason}: {request.path}", "pages": sorted(PAGES)}, status=error.status)
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except Exception:
        # One broken page must say so, and leave the others and the picker alone.
        log.exception("status page failed", path=request.path)
        return _json({"error": f"Internal Server Error: {request.path}"}, status=500)
    response.headers["Cache-Control"] = "no-store"
    return response


def _listen(host: str, port: int) -> socket.socket:
    """One socket for both families where every interface is meant: two would have two free ports."""
    if host not in ("", "::"):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
