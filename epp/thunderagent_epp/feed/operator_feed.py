"""Snapshots from the operator: the picker's end of the capacity feed (kubernetes.md, *Feed*).

The process runs one of these in place of a policy file. It opens the stream with the policy it follows, publishes
each newer snapshot, answers what became of it and tells the picker's counters now and then; when the stream ends,
for whatever reason, it makes a new connection, for ever. Protects requests from the control plane: an operator that
is away, restarts, lags behind another or sends what cannot be applied changes nothing that is in force.

Every attempt is a connection of its own. Through a Service that is what finds the leader: a standby is as easily
reached, and says that it does not lead.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from thunderagent_epp import __version__
from thunderagent_epp.feed import capacity_feed_pb2 as pb
from thunderagent_epp.feed import wire
from thunderagent_epp.feed.capacity_feed_pb2_grpc import CapacityFeedStub
from thunderagent_epp.feed.tls import TlsFiles, channel_credentials
from thunderagent_epp.feed.wire import Applied, Counters
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry import logs

ANSWER_SECONDS: Final = 5.0
"""For connecting and the first message; an operator that serves answers at once."""

KEEPALIVE_SECONDS: Final = 10.0
"""A connection silent for so long is asked for a sign of life, and given up as long after."""

REPORT_SECONDS: Final = 2.0
"""Counters are told once in so long at most."""

POLICY_PATTERN: Final = r"[^/\s]+/[^/\s]+"
TARGET_PATTERN: Final = r"([^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"

log = logs.logger("feed")

_Call = grpc.aio.StreamStreamCall[pb.FollowRequest, pb.FollowResponse]


class Unready(StrEnum):
    """Why the picker should take no requests though it may have a snapshot: the operator says there is no policy."""

    POLICY_NOT_FOUND = "policy_not_found"
    POLICY_DELETED = "policy_deleted"


_UNREADY: Final = {
    pb.NoSnapshot.REASON_NOT_FOUND: Unready.POLICY_NOT_FOUND,
    pb.NoSnapshot.REASON_DELETED: Unready.POLICY_DELETED,
}


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between attempts: doubling from ``first_seconds``, never above ``cap_seconds``, jittered down to a half.

    The cap is low because an attempt costs little and a picker must be ready within two seconds of the operator.
    """

    first_seconds: float = 0.1
    cap_seconds: float = 1.0

    def seconds(self, failures: int, jitter: float) -> float:
        """The wait after so many failures in a row (from 1); ``jitter`` in [0, 1)."""
        doubled: float = self.first_seconds * 2.0 ** min(failures - 1, 30)
        return min(self.cap_seconds, doubled) * (1 - jitter / 2)


class OperatorFeed:
    """Follows one policy at one operator; `run` until cancelled.

    ``target`` is ``host:port``, ``policy`` is ``namespace/name``, ``identity`` names this picker among those of its
    policy. ``publish`` gets each newer snapshot; a ValueError of it refuses the snapshot. ``unready`` is called on
    each change of what the operator says about the policy itself, with None when it is there. ``tls`` None is
    plaintext. Raises ValueError for a target or policy of another form, FeedTlsError when the files cannot be used.
    """

    def __init__(
        self,
        target: str,
        policy: str,
        identity: str,
        publish: Callable[[Snapshot], None],
        *,
        counters: Callable[[], Counters],
        unready: Callable[[Unready | None], None],
        tls: TlsFiles | None = None,
        backoff: Backoff | None = None,
        report_seconds: float = REPORT_SECONDS,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        if not re.fullmatch(TARGET_PATTERN, target):
            raise ValueError(f"the operator's address must be HOST:PORT, not {target!r}")
        if not re.fullmatch(POLICY_PATTERN, policy):
            raise ValueError(f"the policy must be NAMESPACE/NAME, not {policy!r}")
        if tls is not None:
            channel_credentials(tls)
        self._target = target
        self._policy = policy
        self._identity = identity
        self._publish = publish
        self._counters = counters
        self._tell_unready = unready
        self._tls = tls
        self._backoff = backoff or Backoff()
        self._report_seconds = report_seconds
        self._keepalive_seconds = keepalive_seconds
        self._answer_seconds = answer_seconds
        self._connected = False
        self._applied: Applied | None = None
        self._refusal: str | None = None
        self._refusals = 0
        self._unready: Unready | None = None
        self._acknowledgement: pb.FollowRequest | None = None
        self._due = asyncio.Event()
        """Set when there is an acknowledgement to send."""
        self._said: set[str] = set()
        """Kinds of trouble already logged since the operator last answered."""
        self._no_snapshot: tuple[int, str] | None = None
        """What the operator last said about having none."""

    @property
    def connected(self) -> bool:
        """Whether the operator has answered on the present connection."""
        return self._connected

    @property
    def applied(self) -> Applied | None:
        """The snapshot in force."""
        return self._applied

    @property
    def unready(self) -> Unready | None:
        """What the operator says of the policy; stays as it is while the operator is away."""
        return self._unready

    @property
    def refusal(self) -> str | None:
        """Why the last snapshot that came was not applied; None when it was."""
        return self._refusal

    @property
    def refusals(self) -> int:
        """Snapshots refused since the start."""
        return self._refusals

    async def run(self) -> NoReturn:
        """Follow the policy until cancelled; nothing the operator or the network does ends it."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            started = loop.time()
            try:
                await self._follow()
            finally:
                self._connected = False
            # A stream that ends as soon as it has begun is no better than none.
            failures = 1 if loop.time() - started > self._backoff.cap_seconds else failures + 1
            await asyncio.sleep(self._backoff.seconds(failures, random.random()))

    async def _follow(self) -> None:
        """One connection, from its making to its end."""
        try:
            channel = self._channel()
        except ValueError as error:
            self._log_trouble(_Trouble("tls", "TLS files of the feed cannot be used", {"problem": str(error)}))
            return
        async with channel:
            call: _Call = CapacityFeedStub(channel).Follow()  # type: ignore[no-untyped-call]
            try:
                self._log_trouble(await self._exchange(call))
            finally:
                call.cancel()

    async def _exchange(self, call: _Call) -> _Trouble:
        """Open the stream, then listen and report until it ends; how it ended."""
        self._acknowledgement = None
        self._due.clear()
        try:
            async with asyncio.timeout(self._answer_seconds):
                await call.write(self._open())
                response = await call.read()
        except TimeoutError:
            return _Trouble("silent", "operator does not answer", {"seconds": self._answer_seconds})
        except (grpc.aio.AioRpcError, DecodeError) as error:
            return _trouble(error)
        self._answered()
        async with asyncio.TaskGroup() as tasks:
            reporter = tasks.create_task(self._report(call))
            # An error would take the place of a cancellation that comes at the same time, so none is raised.
            trouble = await self._listen(call, response)
            reporter.cancel()
        return trouble

    async def _listen(self, call: _Call, response: object) -> _Trouble:
        try:
            while isinstance(response, pb.FollowResponse):
                self._take(response)
                response = await call.read()
        except (grpc.aio.AioRpcError, DecodeError) as error:
            return _trouble(error)
        return _Trouble("ended", "operator ended the feed", {})

    def _channel(self) -> grpc.aio.Channel:
        keepalive_ms = int(self._keepalive_seconds * 1000)
        options: list[tuple[str, Any]] = [
            ("grpc.keepalive_time_ms", keepalive_ms),
            ("grpc.keepalive_timeout_ms", keepalive_ms),
            # gRPC 1.85 waits a minute for an answer to a ping, whatever the line above says.
            ("grpc.http2.ping_timeout_ms", keepalive_ms),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", wire.MESSAGE_BYTES_MAX),
            # A connection that is not shared with the attempt before, and a name behind which all are tried.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.service_config", '{"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": true}}]}'),
            # The operator is inside the cluster, whatever the environment says about the way out of it.
            ("grpc.enable_http_proxy", 0),
        ]
        if self._tls is None:
            return grpc.aio.insecure_channel(self._target, options=options)
        return grpc.aio.secure_channel(self._target, channel_credentials(self._tls), options=options)

    def _open(self) -> pb.FollowRequest:
        return pb.FollowRequest(
            open=pb.Open(
                policy=self._policy,
                identity=self._identity,
                version=__version__,
                applied=wire.write_applied(self._applied),
            )
        )

    async def _report(self, call: _Call) -> None:
        """Send acknowledgements as they come up, and counters when they have changed and are due."""
        loop = asyncio.get_running_loop()
        told: Counters | None = None
        due = loop.time()
        # The reading side says how a stream ended.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                acknowledgement, self._acknowledgement = self._acknowledgement, None
                if acknowledgement is not None:
                    await call.write(acknowledgement)
                if loop.time() >= due:
                    due = loop.time() + self._report_seconds
                    counters = self._counters()
                    if counters != told:
                        await call.write(pb.FollowRequest(counters=wire.write_counters(counters)))
                        told = counters
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(due):
                        await self._due.wait()
                self._due.clear()

    def _take(self, response: pb.FollowResponse) -> None:
        match response.WhichOneof("message"):
            case "snapshot":
                self._take_snapshot(response.snapshot)
            case "no_snapshot":
                self._take_absence(response.no_snapshot)
            case None:
                log.debug("message of a newer operator ignored")

    def _take_snapshot(self, message: pb.Snapshot) -> None:
        self._no_snapshot = None
        offered = Applied(message.id, message.content_hash)
        applied = self._applied
        if offered == applied:
            self._acknowledge(message.id, None)
        elif applied is not None and message.id <= applied.id:
            self._refuse(message.id, f"not newer than snapshot {applied.id}, which is in force")
        else:
            try:
                self._publish(wire.read_snapshot(message))
            except ValueError as error:
                self._refuse(message.id, str(error))
            except Exception as error:
                log.exception("snapshot could not be applied", snapshot=message.id)
                self._refuse(message.id, f"internal error: {type(error).__name__}: {error}")
            else:
                self._applied = offered
                say = log.info if applied is None or self._refusal is not None else log.debug
                say("snapshot in force", snapshot=message.id, workers=len(message.workers), policy=self._policy)
                self._acknowledge(message.id, None)
        self._ready_unless(None)

    def _take_absence(self, message: pb.NoSnapshot) -> None:
        said = (message.reason, message.detail)
        if said != self._no_snapshot:
            self._no_snapshot = said
            log.warning(
                "operator has no snapshot of the policy; the last one stays",
                policy=self._policy,
                reason=_reason(message.reason),
                detail=message.detail,
                snapshot=None if self._applied is None else self._applied.id,
            )
        unready = _UNREADY.get(message.reason)
        if unready is not None:
            self._ready_unless(unready)

    def _ready_unless(self, unready: Unready | None) -> None:
        if unready is not self._unready:
            self._unready = unready
            self._tell_unready(unready)

    def _refuse(self, snapshot_id: int, reason: str) -> None:
        self._refusals += 1
        if reason != self._refusal:
            log.warning("snapshot refused; the last one stays", snapshot=snapshot_id, problem=reason)
        self._acknowledge(snapshot_id, reason)

    def _acknowledge(self, snapshot_id: int, refusal: str | None) -> None:
        self._refusal = refusal
        self._acknowledgement = pb.FollowRequest(
            acknowledgement=pb.Acknowledgement(
                snapshot_id=snapshot_id, refusal=refusal or "", applied=wire.write_applied(self._applied)
            )
        )
        self._due.set()

    def _answered(self) -> None:
        self._connected = True
        self._said.clear()
        log.info("following the operator", operator=self._target, policy=self._policy)

    def _log_trouble(self, trouble: _Trouble) -> None:
        """Log each kind once until the operator answers again."""
        say = log.debug if trouble.kind in self._said else log.warning
        self._said.add(trouble.kind)
        in_force = None if self._applied is None else self._applied.id
        say(trouble.event, operator=self._target, snapshot=in_force, **trouble.details)


class _Trouble(NamedTuple):
    """Why a connection came to nothing, or to its end."""

    kind: str
    event: str
    details: Mapping[str, object]


def _trouble(error: grpc.aio.AioRpcError | DecodeError) -> _Trouble:
    if isinstance(error, DecodeError):
        return _Trouble("garbled", "operator's message cannot be read", {})
    code = error.code().name
    problem = (error.details() or "").partition("\n")[0]
    return _Trouble(code, "operator cannot be followed", {"code": code, "problem": problem})


def _reason(number: int) -> str:
    """A reason as text, also one of a newer operator."""
    name = pb.NoSnapshot.Reason.Name(number) if number in pb.NoSnapshot.Reason.values() else f"REASON_{number}"
    return name.removeprefix("REASON_").lower()
