"""An HTTP port for people, Prometheus and probes, the same for picker and operator: ``/metrics``, ``/healthz``,
``/readyz``, and pages of a process's own as JSON.

It only prints what it is handed. Requests of clients never come here, so a broken page says so in its answer and the
log, and leaves the process alone.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from thunderagent_epp import __version__
from thunderagent_epp.telemetry import logs

_SHUTDOWN_SECONDS: Final = 1.0
"""Scrapers keep their connections open; nobody loses anything when they are closed."""

log = logs.logger("telemetry")

# Sorted keys, as replay prints them.
_encoder = msgspec.json.Encoder(order="sorted")


class PageServer:
    """Serves one process's pages. `start` and `stop` are each called once, on one loop.

    ``healthy`` and ``ready`` return None when it is, else the reason why not. ``pages`` are by path: what each is,
    for the index, and a function that returns its JSON.
    """

    def __init__(
        self,
        title: str,
        registry: CollectorRegistry,
        *,
        healthy: Callable[[], str | None],
        ready: Callable[[], str | None],
        pages: Mapping[str, tuple[str, Callable[[], object]]],
    ) -> None:
        self._title = title
        self._registry = registry
        self._healthy = healthy
        self._ready = ready
        self._index_lines = {
            "/metrics": "Prometheus metrics, OpenMetrics when asked for",
            "/healthz": "200 while the process works",
            "/readyz": "200 when it is ready, else 503 and the reason",
            **{path: text for path, (text, _) in pages.items()},
        }
        app = web.Application(middlewares=[self._errors_in_json])
        app.add_routes(
            [
                web.get("/", self._index),
                web.get("/metrics", self._exposition),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                *(web.get(path, _page(answer)) for path, (_, answer) in pages.items()),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)

    async def start(self, host: str, port: int) -> int:
        """Listen, on every interface when ``host`` is empty, and return the port; 0 takes a free one.

        Raises OSError that names the address and says what is in the way when it cannot be had.
        """
        try:
            listener = _listen(host, port)
        except OSError as error:
            # Without the address that Python adds, as a tuple, to the system's words.
            reason = (error.strerror or str(error)).partition(" (")[0]
            raise OSError(f"cannot listen on {f'[{host}]' if ':' in host else host}:{port}: {reason}") from error
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
        lines = (f"{path:10} {text}" for path, text in self._index_lines.items())
        return web.Response(text="\n".join([f"{self._title} {__version__}", "", *lines]) + "\n")

    async def _exposition(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return web.Response(body=encode(self._registry), headers={"content-type": content_type})

    async def _healthz(self, _: web.Request) -> web.Response:
        reason = self._healthy()
        return _json({"status": reason or "ok"}, status=200 if reason is None else 503)

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self._ready()
        return _json({"ready": reason is None, "reason": reason or "ok"}, status=200 if reason is None else 503)

    @web.middleware
    async def _errors_in_json(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            problem = f"{error.reason}: {request.path}"
            answer = _json({"error": problem, "pages": sorted(self._index_lines)}, status=error.status)
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
            return answer
        except Exception:
            # One broken page must say so, and leave the others and the process alone.
            log.exception("status page failed", path=request.path)
            return _json({"error": f"Internal Server Error: {request.path}"}, status=500)
        response.headers["Cache-Control"] = "no-store"
        return response


def _page(answer: Callable[[], object]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def page(_: web.Request) -> web.Response:
        return _json(answer())

    return page


def _json(answer: object, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(answer) + b"\n", status=status, content_type="application/json")


def _listen(host: str, port: int) -> socket.socket:
    """One socket for both families where every interface is meant: two would have two free ports."""
    if host not in ("", "::"):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
