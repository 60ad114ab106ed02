"""The simulated worker: an inference server that clients, proxies and probes cannot tell from vLLM by its manners.

`thunderagent simulate-worker` calls `run_worker`; the demo and tests use `running_worker`. This module is the HTTP
shell only: it reads a body with one of the API modules, has the engine loop generate, and writes what the call's
shape says. As long as a handler runs its sequence is in the engine; a client that leaves cancels the handler.

An answer's headers go out with its first token, so they mean that prefill is over. With a role a worker runs one leg of
a disaggregated turn (`prefill_handoff.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from http import HTTPStatus

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from thunderagent_sim import anthropic_api, openai_api, responses_api
from thunderagent_sim.answers import AnswerShape, ApiError, Call, Json, Usage
from thunderagent_sim.engine import Engine, EngineOptions
from thunderagent_sim.engine_loop import Clock, EngineLoop, Generation, LoopClock
from thunderagent_sim.prefill_handoff import (
    PREFILLER_HEADER,
    is_for_another,
    kept_cache,
    remote_prefill,
)
from thunderagent_sim.vllm_metrics import VllmMetrics
from thunderagent_sim.worker_role import WorkerRole

VLLM_VERSION = "0.26.0"
"""The release whose interface this is; `/version` says so, as probes ask for it."""

_MAX_BODY_BYTES = 256 * 1024 * 1024
# As much as uvicorn takes under vLLM.
_MAX_HEADER_BYTES = 64 * 1024
# A simulated turn can take minutes; a worker that is told to stop drops its answers, as vLLM does by default.
_SHUTDOWN_TIMEOUT_SECONDS = 0.1

ReadCall = Callable[[bytes, str], tuple[Call, AnswerShape]]


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How one simulated worker runs.

    ``port`` 0 takes a free one. ``startup_delay_seconds``: how long it listens, as if loading a model, before it is
    healthy, knows its capacity and answers. ``step_seconds``: how often tokens are sent; a fast answer sends several
    at once. ``role`` None: it does prefill and decode, and hands nothing over.
    Raises ValueError naming the option that is out of range.
    """

    engine: EngineOptions
    host: str = "127.0.0.1"
    port: int = 8000
    model: str = "simulated"
    startup_delay_seconds: float = 0.0
    step_seconds: float = 0.02
    role: WorkerRole | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.startup_delay_seconds < math.inf:
            raise ValueError(f"startup_delay must be 0 seconds or more, not {self.startup_delay_seconds}")
        if not 0 < self.step_seconds < math.inf:
            raise ValueError(f"step must be greater than 0, not {self.step_seconds}")


@dataclass(slots=True)
class SimulatedWorker:
    """A worker that listens: where, and the engine inside, for tests to look at."""

    options: WorkerOptions
    engine: Engine
    url: str = ""
    finished: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the worker is told to stop, or with the exception of the engine's task when that has failed."""


class _Handlers:
    """The routes of one worker."""

    def __init__(self, options: WorkerOptions, engine: Engine, clock: Clock, prefillers: aiohttp.ClientSession) -> None:
        self._options = options
        self._prefillers = prefillers
        self._engine_id = str(uuid.uuid4())
        self._clock = clock
        self._ready_at = clock.time() + options.startup_delay_seconds
        self._created = int(time.time())
        self._metrics = VllmMetrics(engine, options.model, lambda: self._ready)
        self.loop = EngineLoop(engine, clock, options.step_seconds, self._metrics.observe_finished)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._errors])
        app.router.add_post("/v1/chat/completions", self._generating(openai_api.read_chat))
        app.router.add_post("/v1/completions", self._generating(openai_api.read_completion))
        app.router.add_post("/v1/responses", self._generating(responses_api.read_responses))
        app.router.add_post("/v1/messages", self._generating(anthropic_api.read_messages))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics_page)
        return app

    @property
    def _ready(self) -> bool:
        return self._clock.time() >= self._ready_at

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            refusal = error
        except web.HTTPException as error:
            refusal = ApiError(HTTPStatus(error.status), error.reason)
        except RecursionError:
            refusal = ApiError(HTTPStatus.BAD_REQUEST, "JSON decode error: nested too deeply")
        anthropic = request.path.startswith("/v1/messages")
        body = anthropic_api.error_body(refusal) if anthropic else openai_api.error_body(refusal)
        return _json(body, refusal.status)

    def _generating(self, read: ReadCall) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            self._require_ready()
            body = await request.read()
            call, shape = read(body, self._options.model)
            if call.model is not None and call.model != self._options.model:
                raise ApiError(
                    HTTPStatus.NOT_FOUND, f"The model `{call.model}` does not exist.", "NotFoundError", "model"
                )
            answer_tokens = call.answer_tokens(self._options.engine.context_limit_tokens)
            transferred = await self._prefilled_elsewhere(request, body)
            generating = self.loop.generate(call.prompt, answer_tokens, call.finish_reason, transferred=transferred)
            with generating as generation:
                if call.stream:
                    return await _stream(request, generation, shape)
                await generation.finished()
                answer = shape.whole(generation.sequence.answer.decode(), _usage(generation))
            if self._options.role is WorkerRole.PREFILL and is_for_another(body):
                blocks = -(-generation.sequence.prompt_tokens // self._options.engine.block_size)
                answer["kv_transfer_params"] = kept_cache(self._engine_id, self._options.host, blocks)
            return _json(answer)

        return handle

    async def _prefilled_elsewhere(self, request: web.Request, body: bytes) -> bool | None:
        """Whether another worker did the prefill; None where none was named."""
        prefiller = request.headers.get(PREFILLER_HEADER)
        if self._options.role is not WorkerRole.DECODE or prefiller is None:
            return None
        return await remote_prefill(self._prefillers, prefiller, request.path, body)

    def _require_ready(self) -> None:
        if not self._ready:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "The simulated worker is still starting.")

    async def _count_tokens(self, request: web.Request) -> web.Response:
        return _json(anthropic_api.count_input_tokens(await request.read()))

    async def _models(self, request: web.Request) -> web.Response:
        card: Json = {
            "id": self._options.model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._options.model,
            "parent": None,
            "max_model_len": self._options.engine.context_limit_tokens,
        }
        return _json({"object": "list", "data": [card]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=HTTPStatus.OK if self._ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": VLLM_VERSION})

    async def _metrics_page(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.page(), headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"}
        )


async def _stream(request: web.Request, generation: Generation, shape: AnswerShape) -> web.StreamResponse:
    """Send an answer as it comes, for as long as the client stays."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    # A client that leaves cancels the handler, but a write may be under way before that.
    with contextlib.suppress(ConnectionResetError):
        async for text in generation.pieces():
            events: list[bytes] = []
            if not response.prepared:
                await response.prepare(request)
                events += shape.opening(replace(_usage(generation), completion_tokens=0))
            events.append(shape.piece(text, _usage(generation)))
            await response.write(b"".join(events))
        closing = shape.closing(generation.sequence.answer.decode(), _usage(generation))
        await response.write(b"".join(closing))
        await response.write_eof()
    return response


def _usage(generation: Generation) -> Usage:
    sequence = generation.sequence
    return Usage(sequence.prompt_tokens, sequence.cached_tokens, sequence.generated_tokens)


def _json(body: Json, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def _own_fault(record: logging.LogRecord) -> bool:
    """Whether the server complains of itself: what is no HTTP is answered 400 and is the client's to know."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_server_log = logging.getLogger(__name__)
_server_log.addFilter(_own_fault)


@contextlib.asynccontextmanager
async def running_worker(options: WorkerOptions, clock: Clock | None = None) -> AsyncIterator[SimulatedWorker]:
    """Run a worker for as long as the scope lasts; its answers in progress are dropped at the end.

    Raises OSError when the address cannot be listened on.
    """
    engine = Engine(options.engine)
    worker = SimulatedWorker(options, engine)
    # A prefill may take as long as it takes; that its worker is gone shows in the connection.
    prefillers = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=5)
    )
    handlers = _Handlers(options, engine, clock or LoopClock(), prefillers)
    runner = web.AppRunner(
        handlers.application(),
        handler_cancellation=True,
        access_log=None,
        logger=_server_log,
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
        shutdown_timeout=_SHUTDOWN_TIMEOUT_SECONDS,
    )
    await runner.setup()
    engine_task = asyncio.create_task(handlers.loop.run(), name="engine")
    engine_task.add_done_callback(lambda task: _report(task, worker.finished))
    try:
        site = web.TCPSite(runner, options.host, options.port, backlog=4096)
        await site.start()
        host, port = runner.addresses[0][:2]
        worker.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        yield worker
    finally:
        await runner.cleanup()
        await prefillers.close()
        engine_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await engine_task


def _report(task: asyncio.Task[None], finished: asyncio.Future[None]) -> None:
    if not task.cancelled() and not finished.done():
        finished.set_exception(task.exception() or RuntimeError("the engine stopped"))


async def run_worker(options: WorkerOptions, announce: Callable[[str], None]) -> None:
    """Run a worker until SIGTERM or SIGINT; ``announce`` is given one line once it listens.

    Raises OSError when the address cannot be listened on.
    """
    loop = asyncio.get_running_loop()
    async with running_worker(options) as worker:

        def stop() -> None:
            if not worker.finished.done():
                worker.finished.set_result(None)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        announce(
            f"simulated worker listening on {worker.url} "
            f"(model {options.model}, {options.engine.capacity_tokens} tokens of KV cache"
            f"{'' if options.role is None else f', {options.role} only'})"
        )
        await worker.finished
