"""State machine of one ext_proc stream: the proxy's messages in, actions out, no I/O and no clock.

Theory of operation. One stream carries one HTTP exchange. Two rules hold for everything here:

1. A proxy waits for an answer to what it sent, in the order and in the *form* in which it sent it. What has not
   been asked is never answered, and no body before its headers.
2. After a `Decide` exactly one `Ended` follows, whatever ends the exchange: an answer that was seen to its end, a
   refusal, an answer of the proxy's own, the proxy closing its side, a reset.

The server feeds each message to `Exchange.receive` and carries out the actions in order. On a `Decide` it asks the
director, which may take as long as it likes, and then calls `Exchange.route` or `Exchange.refuse`; meanwhile it goes
on feeding messages. When the stream is over it calls `Exchange.close`.

    state       request headers   request body      request trailers  response headers  response body, trailers
    ----------  ----------------  ----------------  ----------------  ----------------  -----------------------
    IDLE        READING/DECIDING  unexpected        unexpected        ECHOING           ECHOING
    READING     unexpected        READING/DECIDING  DECIDING          ECHOING           ECHOING
                                  or REFUSED
    DECIDING    unexpected        ignored           ignored           ECHOING, Ended    ECHOING, Ended
    ROUTED      unexpected        passed            passed            RESPONDING        ROUTED
    RESPONDING  unexpected        passed            passed            RESPONDING        RESPONDING, or ECHOING, Ended
    ECHOING     unexpected        passed            passed            ECHOING           ECHOING
    REFUSED     ignored           ignored           ignored           ignored           ignored

    DECIDING goes to ROUTED by `route` and to REFUSED by `refuse`. *Passed*: answered without a change while the
    request has not ended, ignored after its first end of stream, since Envoy may deliver the last chunk twice.

How a request's body reaches us decides when it is whole and which answer may still set a header (Envoy's
``processor_state.cc``); `_Form` has a member for each. Without a word from the proxy it is full-duplex streaming.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, TypeAlias

from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, ProcessingRequest

from thunderagent_epp.extproc import wire
from thunderagent_epp.extproc.actions import Action, Answer, Cause, Decide, Ended, Progress, Refuse, Responding
from thunderagent_epp.extproc.errors import Refusal, Refused, refusal_answer
from thunderagent_epp.extproc.subset import Subset
from thunderagent_epp.extproc.turn import NO_HEADERS, AnswerHeaders
from thunderagent_epp.requests.answer import AnswerReader
from thunderagent_epp.requests.headers import Headers

PROGRESS_EVENTS: Final = 20
"""Events of a streamed answer between two reports of progress (extproc.md)."""


class UnexpectedMessage(Exception):  # noqa: N818 - h11's LocalProtocolError has no counterpart in this protocol
    """The proxy sent what has no meaning in this state; says which filter setting is the likely reason."""


class State(Enum):
    """Where an exchange stands; see the table above."""

    IDLE = auto()
    READING = auto()
    DECIDING = auto()
    ROUTED = auto()
    RESPONDING = auto()
    ECHOING = auto()
    REFUSED = auto()


class _Form(Enum):
    """How the request's body reaches us, and so how the request is answered."""

    DUPLEX = auto()
    """In chunks, without waiting for any answer; the whole is answered in chunks of our own."""
    STREAMED = auto()
    """In chunks, without waiting for the headers' answer; each chunk has an answer of its own."""
    BUFFERED = auto()
    """In one message once the headers are answered; the body's answer can still set headers."""
    UNSEEN = auto()
    """Not at all, or only after the headers have gone upstream; the headers' answer is the last chance."""


_NO_HEADERS: Final = Headers()

_REQUEST_HEADERS_GO_ON: Final = (Answer(wire.REQUEST_HEADERS_GO_ON),)
_REQUEST_BODY_GOES_ON: Final = (Answer(wire.REQUEST_BODY_GOES_ON),)
_REQUEST_TRAILERS_GO_ON: Final = Answer(wire.REQUEST_TRAILERS_GO_ON)
_RESPONSE_HEADERS_GO_ON: Final = Answer(wire.RESPONSE_HEADERS_GO_ON)
_RESPONSE_BODY_GOES_ON: Final = Answer(wire.RESPONSE_BODY_GOES_ON)
_RESPONSE_TRAILERS_GO_ON: Final = Answer(wire.RESPONSE_TRAILERS_GO_ON)


class Exchange:
    """One stream; ``max_body_bytes`` (> 0) is the largest request body that is taken."""

    __slots__ = (
        "_answer_headers",
        "_body",
        "_body_bytes",
        "_chunk_count",
        "_chunks",
        "_form",
        "_handlers",
        "_headers",
        "_max_body_bytes",
        "_ok",
        "_reader",
        "_reported_events",
        "_request_ended",
        "_request_ended_in_body",
        "_request_trailers_came",
        "_response_body_duplex",
        "_response_body_seen",
        "_response_body_sent",
        "_subset",
        "state",
    )

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._headers = _NO_HEADERS
        self._subset: Subset | None = None
        self._answer_headers: AnswerHeaders | None = None
        self._form = _Form.DUPLEX
        self._chunks: list[bytes] = []
        self._chunk_count = 0
        self._body_bytes = 0
        self._body = b""
        self._request_ended = False
        self._request_ended_in_body = False
        self._request_trailers_came = False
        self._ok = False
        self._reader: AnswerReader | None = None
        self._reported_events = 0
        self._response_body_duplex = True
        self._response_body_sent: bool | None = None
        self._response_body_seen = False
        self.state = State.IDLE
        """Where the exchange stands; only to be read."""
        self._handlers = _TABLE[State.IDLE]

    @property
    def path(self) -> str:
        """The request's path without its query; empty before the request headers came."""
        return (self._headers.get(":path") or "").partition("?")[0]

    @property
    def over(self) -> bool:
        """Whether nothing that the proxy may still say matters: a request was refused and has come to its end."""
        return self.state is State.REFUSED and self._request_ended

    def receive(self, message: ProcessingRequest) -> Sequence[Action]:
        """Take one message of the proxy and return what is to be done, in order.

        Raises UnexpectedMessage where the message has no meaning now; the exchange is then only to be closed.
        """
        kind = message.WhichOneof("request")
        if kind is None:
            return ()  # a kind of message newer than this code: the proxy cannot rely on an answer
        if self.state is State.IDLE:
            self._configure(message)
        return self._handlers[kind](self, message)

    def route(
        self,
        endpoint: str,
        *,
        body: bytes | None = None,
        set_headers: Mapping[str, str] = NO_HEADERS,
        answer_headers: AnswerHeaders | None = None,
    ) -> Sequence[Answer]:
        """Send the request on to ``endpoint`` (``ip:port`` or ``[v6]:port``).

        ``body`` replaces the request's, None leaves it as it came; where the proxy does not show the body it cannot
        be replaced. ``set_headers`` are further request headers to set, by lower-case name; ``answer_headers`` says
        which to set on the answer.
        """
        assert self.state is State.DECIDING, f"routed while {self.state}"
        assert body is None or self._form is not _Form.UNSEEN, "a body that is not shown cannot be replaced"
        self._answer_headers = answer_headers
        whole = self._body
        self._forget_request()
        self._enter(State.ROUTED)
        if self._form is _Form.BUFFERED:
            return (Answer(wire.buffered_destination(endpoint, set_headers, body)),)
        answers = [Answer(wire.destination(endpoint, set_headers))]
        if self._form is _Form.STREAMED:
            answers += map(Answer, wire.streamed_request_body(self._chunk_count, body))
        elif self._chunk_count:
            replaced = whole if body is None else body
            answers += map(Answer, wire.duplex_request_body(replaced, self._request_ended_in_body))
        if self._request_trailers_came:
            answers.append(_REQUEST_TRAILERS_GO_ON)
        return answers

    def refuse(self, refused: Refused) -> Sequence[Ended | Refuse]:
        """Answer the request with a refusal; nothing is sent upstream."""
        assert self.state is State.DECIDING, f"refused while {self.state}"
        return (Ended(False, None, Cause.REFUSED), self._refusal(refused))

    def close(self, cause: Cause) -> Ended | None:
        """The stream is over: ``Cause.CLOSED`` if the proxy closed its side in order, else what tore it down.

        Where response bodies are not sent at all, the proxy's close after the response headers is the end of the
        answer (extproc.md, *End*). So is whatever comes after an answer that has said itself that it is complete:
        OpenAI's own client closes its connection on ``[DONE]``, before the worker has ended the body. Returns None if
        there was nothing to decide or `Ended` has been said.
        """
        if self.state is State.RESPONDING and (self._is_end_of_unseen_body(cause) or self._has_concluded()):
            return self._end(self._answer_cause())
        if self.state in (State.DECIDING, State.ROUTED, State.RESPONDING):
            return self._end(cause)
        return None

    # Transitions

    def _enter(self, state: State) -> None:
        self.state = state
        self._handlers = _TABLE[state]

    def _decide(self) -> Sequence[Action]:
        self._enter(State.DECIDING)
        # A buffered body without its end of stream may have been cut short (BUFFERED_PARTIAL): better not read.
        body = b"" if self._form is _Form.BUFFERED and not self._request_ended else b"".join(self._chunks)
        self._chunks = []
        if self._form is _Form.DUPLEX:
            self._body = body
        return (Decide(self._headers, body, self._subset),)

    def _end(self, cause: Cause) -> Ended:
        self._enter(State.ECHOING)
        self._forget_request()
        completed = cause is Cause.ANSWERED
        if completed and self._reader is not None:
            self._reader.finish()
        return Ended(completed, self._reader if self._response_body_seen else None, cause)

    def _refusal(self, refused: Refused) -> Refuse:
        self._enter(State.REFUSED)
        self._forget_request()
        answer = refusal_answer(refused, self.path)
        return Refuse(refused.code, self.path, wire.immediate(answer, f"thunderagent_{refused.code}"))

    def _forget_request(self) -> None:
        self._chunks = []
        self._body = b""

    # Messages of the request

    def _configure(self, message: ProcessingRequest) -> None:
        """The first message says how bodies are sent; a proxy that does not say sends both full-duplex."""
        if not message.HasField("protocol_config"):
            return
        config = message.protocol_config
        mode = config.request_body_mode
        if mode in (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL):
            self._form = _Form.BUFFERED
        elif mode == ProcessingMode.STREAMED and config.send_body_without_waiting_for_header_response:
            self._form = _Form.STREAMED
        elif mode != ProcessingMode.FULL_DUPLEX_STREAMED:
            self._form = _Form.UNSEEN
        self._response_body_duplex = config.response_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
        self._response_body_sent = config.response_body_mode != ProcessingMode.NONE

    def _request_headers(self, message: ProcessingRequest) -> Sequence[Action]:
        request = message.request_headers
        self._headers = Headers(wire.header_pairs(request))
        self._read_subset(message)
        if request.end_of_stream:
            self._request_ended = True
            self._form = _Form.UNSEEN
        if self._form is _Form.UNSEEN:
            return self._decide()
        self._enter(State.READING)
        return _REQUEST_HEADERS_GO_ON if self._form is _Form.BUFFERED else ()

    def _request_body(self, message: ProcessingRequest) -> Sequence[Action]:
        request = message.request_body
        chunk = request.body
        self._read_subset(message)
        self._request_ended = self._request_ended_in_body = request.end_of_stream
        self._body_bytes += len(chunk)
        if self._body_bytes > self._max_body_bytes:
            limit = f"The request body is larger than the {self._max_body_bytes} bytes this gateway accepts."
            return (self._refusal(Refused(Refusal.BODY_TOO_LARGE, limit)),)
        self._chunks.append(chunk)
        self._chunk_count += 1
        # A buffered body comes whole even when its end of stream is left to trailers.
        if self._request_ended or self._form is _Form.BUFFERED:
            return self._decide()
        return ()

    def _request_trailers(self, message: ProcessingRequest) -> Sequence[Action]:
        self._read_subset(message)
        self._request_ended = self._request_trailers_came = True
        return self._decide()

    def _pass_request_body(self, message: ProcessingRequest) -> Sequence[Action]:
        if self._request_ended:
            return ()
        self._request_ended = message.request_body.end_of_stream
        return () if self._form is _Form.DUPLEX else _REQUEST_BODY_GOES_ON

    def _pass_request_trailers(self, message: ProcessingRequest) -> Sequence[Action]:
        if self._request_ended:
            return ()
        self._request_ended = True
        return () if self._form is _Form.DUPLEX else (_REQUEST_TRAILERS_GO_ON,)

    def _drop_request(self, message: ProcessingRequest) -> Sequence[Action]:
        if message.request_body.end_of_stream or message.HasField("request_trailers"):
            self._request_ended = True
        return ()

    def _read_subset(self, message: ProcessingRequest) -> None:
        if message.HasField("metadata_context"):
            subset = Subset.from_metadata(message.metadata_context)
            if subset is not None:
                self._subset = subset

    # Messages of the response

    def _response_headers(self, message: ProcessingRequest) -> Sequence[Action]:
        headers = Headers(wire.header_pairs(message.response_headers))
        status = headers.get(":status") or ""
        self._ok = len(status) == 3 and status.startswith("2")
        self._enter(State.RESPONDING)
        responding = Responding(self._ok, wire.served_endpoint(message))
        go_on = _RESPONSE_HEADERS_GO_ON
        if self._answer_headers is not None:
            go_on = Answer(wire.response_headers(self._answer_headers(message)))
        if message.response_headers.end_of_stream:
            return (responding, self._end(self._answer_cause()), go_on)
        if self._ok:
            self._reader = AnswerReader(headers.get("content-type"), headers.get("content-encoding"))
        return (responding, go_on)

    def _response_body(self, message: ProcessingRequest) -> Sequence[Action]:
        body = message.response_body
        self._response_body_seen = True
        reader = self._reader
        if reader is not None:
            reader.feed(body.body)
        if body.end_of_stream:
            return (self._end(self._answer_cause()), self._body_echo(body))
        if reader is not None and reader.events - self._reported_events >= PROGRESS_EVENTS:
            self._reported_events = reader.events
            return (Progress(reader.events), self._body_echo(body))
        return (self._body_echo(body),)

    def _response_trailers(self, message: ProcessingRequest) -> Sequence[Action]:
        return (self._end(self._answer_cause()), _RESPONSE_TRAILERS_GO_ON)

    def _local_reply(self, message: ProcessingRequest) -> Sequence[Action]:
        return (self._end(Cause.LOCAL_REPLY), *self._echo(message))

    def _give_up_reading(self, message: ProcessingRequest) -> Sequence[Action]:
        self._enter(State.ECHOING)
        self._forget_request()
        return self._echo(message)

    def _echo(self, message: ProcessingRequest) -> Sequence[Action]:
        match message.WhichOneof("request"):
            case "response_headers":
                return (_RESPONSE_HEADERS_GO_ON,)
            case "response_body":
                return (self._body_echo(message.response_body),)
            case _:
                return (_RESPONSE_TRAILERS_GO_ON,)

    def _body_echo(self, body: HttpBody) -> Answer:
        return Answer(wire.duplex_response_body(body)) if self._response_body_duplex else _RESPONSE_BODY_GOES_ON

    def _answer_cause(self) -> Cause:
        return Cause.ANSWERED if self._ok else Cause.UPSTREAM_STATUS

    def _has_concluded(self) -> bool:
        return self._reader is not None and self._reader.concluded

    def _is_end_of_unseen_body(self, cause: Cause) -> bool:
        if self._response_body_sent is None:
            # The proxy did not say whether it shows bodies, so one that has shown none is taken not to.
            return cause is Cause.CLOSED and not self._response_body_seen
        # Envoy's orderly close is a half-close with a reset right behind it, of which gRPC may see only the latter.
        return not self._response_body_sent and cause in (Cause.CLOSED, Cause.RESET)

    # Messages without a meaning

    def _ignore(self, message: ProcessingRequest) -> Sequence[Action]:
        return ()

    def _unexpected(self, message: ProcessingRequest) -> Sequence[Action]:
        kind = message.WhichOneof("request")
        hint = (
            "set request_header_mode to SEND in the ext_proc filter"
            if self.state is State.IDLE
            else "each stream carries one exchange"
        )
        raise UnexpectedMessage(f"{kind} came while {self.state.name.lower()}: {hint}")


_Handler: TypeAlias = Callable[[Exchange, ProcessingRequest], Sequence[Action]]


def _row(
    request_headers: _Handler,
    request_body: _Handler,
    request_trailers: _Handler,
    response_headers: _Handler,
    response_body: _Handler,
    response_trailers: _Handler,
) -> dict[str, _Handler]:
    return {
        "request_headers": request_headers,
        "request_body": request_body,
        "request_trailers": request_trailers,
        "response_headers": response_headers,
        "response_body": response_body,
        "response_trailers": response_trailers,
    }


_X: Final = Exchange
# fmt: off
_TABLE: Final[dict[State, dict[str, _Handler]]] = {
    State.IDLE: _row(
        _X._request_headers, _X._unexpected, _X._unexpected,
        _X._give_up_reading, _X._give_up_reading, _X._give_up_reading),
    State.READING: _row(
        _X._unexpected, _X._request_body, _X._request_trailers,
        _X._give_up_reading, _X._give_up_reading, _X._give_up_reading),
    State.DECIDING: _row(
        _X._unexpected, _X._ignore, _X._ignore,
        _X._local_reply, _X._local_reply, _X._local_reply),
    State.ROUTED: _row(
        _X._unexpected, _X._pass_request_body, _X._pass_request_trailers,
        _X._response_headers, _X._echo, _X._echo),
    State.RESPONDING: _row(
        _X._unexpected, _X._pass_request_body, _X._pass_request_trailers,
        _X._echo, _X._response_body, _X._response_trailers),
    State.ECHOING: _row(
        _X._unexpected, _X._pass_request_body, _X._pass_request_trailers,
        _X._echo, _X._echo, _X._echo),
    State.REFUSED: _row(
        _X._ignore, _X._drop_request, _X._drop_request,
        _X._ignore, _X._ignore, _X._ignore),
}
# fmt: on
