"""The gRPC shell around the exchange: streams, holds, cancellation and drain.

Each ext_proc stream is one coroutine that feeds the proxy's messages to an `Exchange` and carries out what it asks
for; decisions are the director's. Only a request that has to wait gets a second task, so that its stream goes on
being read: the proxy may answer by itself, or the client leave, and either ends the hold. What this module protects
from: a turn that the director let in and that nobody ends. Whatever happens to a stream, its turn is ended before
the coroutine is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter_ns
from typing import Final, TypeAlias

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from thunderagent_epp.extproc.actions import Action, Answer, Cause, Decide, Ended, Progress, Refuse, Responding
from thunderagent_epp.extproc.errors import Refusal, Refused
from thunderagent_epp.extproc.exchange import Exchange, State, UnexpectedMessage
from thunderagent_epp.extproc.health import EXT_PROC_SERVICE
from thunderagent_epp.extproc.ports import listen
from thunderagent_epp.extproc.turn import Picker, Placement, Turn
from thunderagent_epp.requests.body import strip_fields
from thunderagent_epp.requests.inference import InvalidRequest, read_request
from thunderagent_epp.telemetry.logs import logger
from thunderagent_epp.telemetry.metrics import Metrics, Outcome

_log = logger("extproc")

DEFAULT_MAX_BODY_BYTES: Final = 64 << 20

_NO_LIMIT: Final = 2**31 - 1

_GRPC_OPTIONS: Final = (
    # A buffered body comes as one message: one over the limit is to be refused with 413, not to break the stream.
    ("grpc.max_receive_message_length", -1),
    # gRPC would refuse streams at random once 1,000 wait to be taken up, which a burst of clients brings about.
    ("grpc.server.max_pending_requests", _NO_LIMIT),
    ("grpc.server.max_pending_requests_hard_limit", _NO_LIMIT),
    # A second picker on the same port is to fail at its start, not to take every other connection.
    ("grpc.so_reuseport", 0),
    # Proxies probe idle connections; gRPC would take pings more often than every five minutes for an attack.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)

_FLUSH_SECONDS: Final = 1.0
"""How long streams without a turn may take to end when the server stops: refusals are still to be delivered."""

_RESET_SECONDS: Final = 0.05
"""How long after the end of a proxy's messages gRPC may take to say that they were cut off, not closed."""

_SECONDS_PER_NANOSECOND: Final = 1e-9

# Not REFUSED: that is a hold ending itself, with the refusal still to be sent.
_ENDS_A_HOLD: Final = frozenset({Cause.LOCAL_REPLY, Cause.CLOSED, Cause.RESET, Cause.DRAIN, Cause.FAILED})

Context: TypeAlias = "grpc.aio.ServicerContext[ProcessingRequest, ProcessingResponse]"


class Server:
    """Serves ``ExternalProcessor/Process`` for one picker, and other services beside it on the same port.

    ``max_body_bytes`` (> 0) is the largest request body that is taken. ``services`` are called with the gRPC server
    before it starts, to add what they have to add.
    """

    def __init__(
        self,
        picker: Picker,
        metrics: Metrics,
        *,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
        services: Iterable[Callable[[grpc.aio.Server], None]] = (),
    ) -> None:
        self.picker: Final = picker
        self.metrics: Final = metrics
        self.max_body_bytes: Final = max_body_bytes
        self.open_streams = 0
        self.running_turns = 0
        self.stopping = False
        self._services = tuple(services)
        self._grpc: grpc.aio.Server | None = None
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self._no_turns = asyncio.Event()
        self._no_turns.set()

    async def start(self, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
        """Listen on ``host`` and ``port`` (0 takes a free one), without TLS if ``credentials`` is None.

        Returns the port. Raises OSError if it cannot be had.
        """
        server = grpc.aio.server(options=_GRPC_OPTIONS)
        process = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {"Process": process}),))
        for add_to in self._services:
            add_to(server)
        bound = listen(server, host, port, credentials)
        await server.start()
        self._grpc = server
        return bound

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until no turn is running, for at most ``timeout_seconds`` (≥ 0), then stop.

        New requests are still answered meanwhile: it is the director that refuses them. What runs on after the time
        is cut off.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._no_turns.wait()
        except TimeoutError:
            _log.warning("drain_timed_out", running_turns=self.running_turns, timeout_seconds=timeout_seconds)
            await self.stop(0)
        else:
            await self.stop(_FLUSH_SECONDS)

    async def stop(self, grace_seconds: float) -> None:
        """Take no more streams, cut off those still open after ``grace_seconds`` (≥ 0), and wait for their ends."""
        self.stopping = True
        if self._grpc is not None:
            await self._grpc.stop(grace_seconds)
        await self._no_streams.wait()

    async def _process(self, _: object, context: Context) -> None:
        self.open_streams += 1
        self._no_streams.clear()
        try:
            await _Stream(self, context).run()
        finally:
            self.open_streams -= 1
            if self.open_streams == 0:
                self._no_streams.set()

    def turn_began(self) -> None:
        """A stream has a turn to end."""
        self.running_turns += 1
        self._no_turns.clear()

    def turn_ended(self) -> None:
        """A stream has ended its turn."""
        self.running_turns -= 1
        if self.running_turns == 0:
            self._no_turns.set()


class _RequestOver(Exception):  # noqa: N818 - it only ends the reading of a stream whose hold was refused
    """Nothing more is to be read or sent on this stream."""


class _Stream:
    """One ext_proc stream from its first message to its end.

    Of what an exchange asks for at once, everything comes before what is to be sent; so no cancellation, which can
    only strike while something is awaited, gets between an end and its turn.
    """

    __slots__ = ("_context", "_exchange", "_hold", "_new_body", "_server", "_turn")

    def __init__(self, server: Server, context: Context) -> None:
        self._server = server
        self._context = context
        self._exchange = Exchange(server.max_body_bytes)
        self._turn: Turn | None = None
        self._new_body: bytes | None = None
        self._hold: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve the stream until the proxy has closed its side or nothing is left to say."""
        failure: tuple[grpc.StatusCode, str] | None = None
        try:
            try:
                await self._read()
            except* _RequestOver:
                pass
            except* UnexpectedMessage as unexpected:
                failure = (grpc.StatusCode.FAILED_PRECONDITION, str(unexpected.exceptions[0]))
                _log.warning("unexpected_message", reason=failure[1])
            except* grpc.aio.BaseError:
                # Sending failed: the proxy is gone, and its cancellation is on the way.
                self._close(self._cut_off(Cause.RESET))
            except* Exception as broken:
                failure = (grpc.StatusCode.INTERNAL, "the endpoint picker failed; its log says why")
                _log.error("stream_failed", path=self._exchange.path, exc_info=broken)
        except asyncio.CancelledError:
            self._close(self._cut_off(Cause.RESET))
            raise
        if failure is not None:
            self._close(Cause.FAILED)
            # Not an answer of ours: what the client gets is up to the proxy's failure mode.
            await self._context.abort(*failure)

    async def _read(self) -> None:
        """Carry out what the proxy's messages ask for, until it closes its side."""
        while not self._exchange.over:
            message = await self._context.read()
            if message is grpc.aio.EOF:
                if self._exchange.state is State.RESPONDING:
                    # A reset reads the same at first; here alone it may mean something else, and it shows right after.
                    await asyncio.sleep(_RESET_SECONDS)
                self._close(self._cut_off(Cause.CLOSED))
                return
            arrived = perf_counter_ns()
            actions = self._exchange.receive(message)
            del message
            if actions and isinstance(actions[0], Decide):
                actions = self._decide(actions[0])
                if self._turn is not None and self._turn.placement is None:
                    await self._read_on_while_held(self._turn, perf_counter_ns() - arrived)
                    return
                await self._carry_out(actions)
                self._server.metrics.processing((perf_counter_ns() - arrived) * _SECONDS_PER_NANOSECOND)
            else:
                await self._carry_out(actions)
            # The next message may be minutes away, and a body is in these.
            del actions

    def _decide(self, decide: Decide) -> Sequence[Action]:
        """Ask the picker; returns nothing if the request is held."""
        picker = self._server.picker
        policy = picker.policy
        try:
            request = read_request(decide.headers, decide.body, policy)
            turn = picker.admit(request, subset=decide.subset, body_bytes=len(decide.body))
        except InvalidRequest as invalid:
            return self._exchange.refuse(Refused(Refusal.INVALID_REQUEST, f"The request cannot be read: {invalid}."))
        except Refused as refused:
            return self._exchange.refuse(refused)
        self._turn = turn
        self._server.turn_began()
        if request.inference and policy.strip_body_fields and decide.body:
            stripped = strip_fields(decide.body, policy.strip_body_fields)
            if stripped is not decide.body:
                self._new_body = stripped
        return () if turn.placement is None else self._route(turn.placement)

    def _route(self, placement: Placement) -> Sequence[Action]:
        new_body, self._new_body = self._new_body, None
        return self._exchange.route(
            placement.endpoint,
            body=new_body,
            set_headers=placement.set_headers,
            answer_headers=placement.answer_headers,
        )

    async def _read_on_while_held(self, turn: Turn, spent_ns: int) -> None:
        """Read the rest of the stream while the request waits for its release, and beyond."""
        async with asyncio.TaskGroup() as holds:
            self._hold = holds.create_task(self._wait(turn, spent_ns))
            await self._read()

    async def _wait(self, turn: Turn, spent_ns: int) -> None:
        """The hold of one request: wait for its release and send it on, or its refusal."""
        try:
            try:
                placement = await turn.released()
            except Refused as refused:
                released = perf_counter_ns()
                await self._carry_out(self._exchange.refuse(refused))
            else:
                released = perf_counter_ns()
                await self._carry_out(self._route(placement))
            spent_ns += perf_counter_ns() - released
            self._server.metrics.processing(spent_ns * _SECONDS_PER_NANOSECOND)
        finally:
            self._hold = None
        if self._exchange.over:
            raise _RequestOver

    async def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Answer):
                await self._send(action.response)
            elif isinstance(action, Progress):
                if self._turn is not None:
                    self._turn.progress(action.events)
            elif isinstance(action, Responding):
                if self._turn is not None:
                    self._turn.responding(action.served)
            elif isinstance(action, Ended):
                self._end_turn(action)
            elif isinstance(action, Refuse):
                self._server.metrics.refusal(action.code)
                self._server.metrics.request(action.path, Outcome.REFUSED)
                await self._send(action.response)

    async def _send(self, response: ProcessingResponse) -> None:
        hold = self._hold
        if hold is not None and hold is not asyncio.current_task():
            # A worker may answer before the last chunk of a released request is out, and gRPC takes one at a time.
            await asyncio.wait((hold,))
        await self._context.write(response)

    def _end_turn(self, ended: Ended) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        self._server.turn_ended()
        turn.ended(ended.completed, ended.reader, ended.cause)
        if self._hold is not None and ended.cause in _ENDS_A_HOLD:
            self._hold.cancel()

    def _close(self, cause: Cause) -> None:
        ended = self._exchange.close(cause)
        if self._turn is not None:
            self._end_turn(ended or Ended(False, None, cause))

    def _cut_off(self, cause: Cause) -> Cause:
        """What tore the stream down: a server that stops cuts off what it still has, which looks like anything."""
        return Cause.DRAIN if self._server.stopping else cause
