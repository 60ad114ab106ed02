"""Joins classifier and selector for the server: one request in, one placement out, now or after a hold.

The server asks `Director.admit` once a request is whole and tells the returned `Admission` what becomes of it. The
director owns the only classifier and selector of the process and gives each the events of the other, so that what is
charged, what is counted as load and what was really sent never drift apart. It knows neither the protocol nor HTTP.
It runs in the event loop's thread and never awaits while it decides; a hold is one future that the releasing event
sets, so nothing polls and nothing runs for a request that waits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Final

from thunderagent_epp.extproc.actions import Cause
from thunderagent_epp.extproc.admission import Admission
from thunderagent_epp.extproc.errors import Refusal, Refused
from thunderagent_epp.extproc.holds import Holds
from thunderagent_epp.extproc.prefill_leg import PrefillLeg
from thunderagent_epp.extproc.subset import Subset
from thunderagent_epp.extproc.turn import Placement
from thunderagent_epp.requests.answer import AnswerReader, context_tokens
from thunderagent_epp.requests.inference import InferenceRequest
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.requests.tokens import BytesPerToken
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, WorkerRank
from thunderagent_epp.scheduling.decisions import Decision, Reason, Reject, Release, Resume, State
from thunderagent_epp.scheduling.policies import pooled_rules
from thunderagent_epp.scheduling.program import Lifecycle
from thunderagent_epp.scheduling.rules import AdmissionRules
from thunderagent_epp.scheduling.selector import Selector
from thunderagent_epp.scheduling.topology import RetentionPool, decode_pool
from thunderagent_epp.scheduling.two_ledgers import TwoLedgers
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry.logs import logger
from thunderagent_epp.telemetry.metrics import HoldClass, Metrics, Outcome
from thunderagent_epp.telemetry.status import (
    Gauges,
    Readiness,
    SnapshotStatus,
    Status,
    policy_parameters,
    worker_statuses,
)

_log = logger("scheduling")
_extproc_log = logger("extproc")

LONG_HOLD_SECONDS: Final = 60.0

DEFAULT_MAX_HELD_BYTES = 1 << 30

_REFUSALS = {Reason.REQUEST_LIMIT: Refusal.REQUEST_LIMIT, Reason.PROGRAM_LIMIT: Refusal.PROGRAM_LIMIT}


class Director:
    """Admits, holds, places and accounts for every request of the process.

    ``clock`` gives seconds that never decrease. ``max_held_bytes`` bounds the bodies of held requests.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        max_held_bytes: int = DEFAULT_MAX_HELD_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._snapshot: Snapshot | None = None
        self._applied_at = 0.0
        self._classifier: AdmissionRules[Any] | TwoLedgers | None = None
        self._selector = Selector()
        self._prefill = PrefillLeg()
        self._bytes_per_token = BytesPerToken()
        self._by_endpoint: dict[str, WorkerRank] = {}
        self._ids = count(1)
        self._holds: Holds[Admission] = Holds(metrics, max_held_bytes, clock, self._hold_timed_out)
        self._told_of_holds_at = -math.inf
        self._retiring = False
        self._unready: Readiness | None = None
        self._draining = False
        self._open_streams: Callable[[], int] = lambda: 0
        self._interval_changed = asyncio.Event()
        self._carrying_out: deque[Decision] | None = None

    # -- the process around it -------------------------------------------------------------------------------------

    @property
    def policy(self) -> RequestPolicy:
        """How requests are to be read; the defaults before the first snapshot."""
        return RequestPolicy() if self._snapshot is None else self._snapshot.requests

    @property
    def readiness(self) -> Readiness:
        """Whether requests are taken."""
        if self._retiring:
            return Readiness.DRAINING
        if self._unready is not None:
            return self._unready
        return Readiness.NO_SNAPSHOT if self._snapshot is None else Readiness.OK

    def set_unready(self, reason: Readiness | None) -> None:
        """Be not ready for a reason of the feed's, None for none; requests are taken all the same."""
        self._unready = reason

    def apply(self, snapshot: Snapshot) -> None:
        """Take a newer snapshot into force; what it changes shows at the next arrival or tick."""
        before, self._snapshot, self._applied_at = self._snapshot, snapshot, self._clock()
        self._by_endpoint = {worker.endpoint: worker.id for worker in snapshot.capacity.workers}
        self._selector.snapshot(_takers(snapshot))
        self._prefill.snapshot(snapshot.capacity, snapshot.disaggregation)
        self._metrics.keep_workers(snapshot.capacity.by_id)
        if before is None or before.admission != snapshot.admission or _ledgers(before) != _ledgers(snapshot):
            self._configure(snapshot, before)
        else:
            self._keep_ledgers(snapshot)

    async def run(self) -> None:
        """Tick at the policy's interval until cancelled."""
        while True:
            interval = None if self._classifier is None else self._classifier.interval_seconds
            try:
                async with asyncio.timeout(interval):
                    await self._interval_changed.wait()
                self._interval_changed.clear()
            except TimeoutError:
                self.tick()

    def tick(self) -> None:
        """Resume, force and pause what is due, and log what that changed."""
        if self._classifier is None:
            return
        decisions = self._classifier.tick(self._clock())
        self._carry_out(decisions)
        self._tell_of_long_holds()
        if not decisions:
            return
        forced = sum(isinstance(decision, Resume) and decision.forced for decision in decisions)
        if forced:
            _log.warning("resumes forced", programs=forced)
        census = self._classifier.census
        _log.debug(
            "tick",
            decisions=len(decisions),
            tracked=self._classifier.tracked,
            waiting=self._classifier.waiting,
            programs={f"{status}_{lifecycle}": number for (status, lifecycle), number in census.items()},
        )

    def _tell_of_long_holds(self) -> None:
        """Say now and then that requests have waited for long: to their clients it looks as if nothing happened."""
        longest, now = self._holds.longest_seconds, self._clock()
        if longest >= LONG_HOLD_SECONDS and now - self._told_of_holds_at >= LONG_HOLD_SECONDS:
            self._told_of_holds_at = now
            _extproc_log.info("requests are held for long", holds=len(self._holds), longest_seconds=round(longest))

    def retire(self) -> None:
        """Be ready no longer, so that proxies go elsewhere; requests are still taken."""
        self._retiring = True

    def drain(self) -> None:
        """Refuse every held request and every new one; those released go on."""
        self._retiring = self._draining = True
        for admission in self._holds.all():
            self._refuse_hold(admission, Refused(Refusal.DRAINING))

    def watch_streams(self, open_streams: Callable[[], int]) -> None:
        """Where the number of open streams can be asked for."""
        self._open_streams = open_streams

    def gauges(self) -> Gauges:
        """The numbers of this moment."""
        classifier, snapshot = self._classifier, self._snapshot
        return Gauges(
            readiness=self.readiness,
            snapshot=self._snapshot_status(),
            workers=() if snapshot is None else worker_statuses(snapshot.capacity, self._used),
            programs={} if classifier is None else {(str(s), str(c)): n for (s, c), n in classifier.census.items()},
            waiting=0 if classifier is None else classifier.waiting,
            tracked=0 if classifier is None else classifier.tracked,
            holds=len(self._holds),
            held_bytes=self._holds.bytes,
            open_streams=self._open_streams(),
            bytes_per_token=self._bytes_per_token.ratios(),
        )

    def status(self) -> Status:
        """Everything there is to see, with every program."""
        snapshot = self._snapshot
        nothing = State(programs={}, used={}, waiting=(), tracked=0)
        return Status(
            readiness=self.readiness,
            policy=None if snapshot is None else policy_parameters(snapshot),
            snapshot=self._snapshot_status(),
            holds=len(self._holds),
            held_bytes=self._holds.bytes,
            workers=() if snapshot is None else worker_statuses(snapshot.capacity, self._used),
            state=nothing if self._classifier is None else self._classifier.dump(),
        )

    # -- one request -----------------------------------------------------------------------------------------------

    def admit(self, request: InferenceRequest, *, subset: Subset | None, body_bytes: int) -> Admission:
        """Let a request in: placed at once or held. Raises Refused, with nothing changed."""
        if self._draining:
            raise Refused(Refusal.DRAINING)
        if self._snapshot is None:
            raise Refused(Refusal.NO_SNAPSHOT)
        candidates = self._candidates(subset)
        if self._selector.pick(None, candidates) is None:
            raise Refused(Refusal.NO_ENDPOINTS)
        admission = Admission(self, str(next(self._ids)), request, subset, body_bytes)
        admission.input_tokens = self._bytes_per_token.input_tokens(request.model, request.prompt_bytes)
        classifier = self._classifier
        if classifier is None or request.session is None:
            self._place(admission, None, candidates)
            return admission
        lifecycle = classifier.lifecycle(request.session)
        decisions = classifier.arrive(
            admission.id, request.session, admission.input_tokens, self._clock(), final=request.final
        )
        if decisions and isinstance(decisions[0], Reject):
            raise Refused(_REFUSALS[decisions[0].reason])
        admission.tracked = True
        own = next((one for one in decisions if isinstance(one, Release) and one.request == admission.id), None)
        if own is None:
            self._start_hold(admission, lifecycle)
        else:
            self._place(admission, own.worker, candidates)
        self._carry_out(one for one in decisions if one is not own)
        return admission

    def _candidates(self, subset: Subset | None) -> frozenset[WorkerRank] | None:
        if subset is None:
            return None
        return frozenset(worker for endpoint, worker in self._by_endpoint.items() if subset.allows(endpoint))

    def _place(
        self, admission: Admission, target: WorkerRank | None, candidates: frozenset[WorkerRank] | None
    ) -> Placement:
        """Select, and account for it. Raises Refused if no candidate is left, which only a hold can see happen."""
        assert self._snapshot is not None
        worker = self._selector.pick(target, candidates)
        if worker is None:
            raise Refused(Refusal.NO_ENDPOINTS)
        admission.worker = worker
        self._selector.started(admission.id, worker, admission.input_tokens)
        if admission.tracked and self._classifier is not None:
            self._classifier.sent(admission.id, worker)
        self._metrics.pick(worker)
        two = self._classifier if isinstance(self._classifier, TwoLedgers) else None
        prefill, placement = self._prefill.place(
            admission.id,
            admission.request,
            admission.input_tokens,
            worker,
            target=None if two is None else two.prefill_target(admission.id),
            subset=candidates,
        )
        if prefill is not None:
            self._metrics.prefill(prefill)
            if two is not None:
                two.prefilled(admission.id, prefill)
        admission.placement = placement
        _log.debug(
            "released",
            request=admission.id,
            session=admission.request.session,
            worker=str(worker),
            **({} if prefill is None else {"prefill_worker": str(prefill)}),
        )
        return placement

    def responding(self, admission: Admission, served: str | None) -> None:
        """See `Admission.responding`."""
        worker = None if served is None else self._by_endpoint.get(served)
        if worker is not None and worker != admission.worker:
            admission.worker = worker
            if admission.tracked and self._classifier is not None:
                self._classifier.sent(admission.id, worker)
        self._selector.responding(admission.id, worker)
        self._prefill.over(admission.id)

    def progress(self, admission: Admission, tokens: int) -> None:
        """The live context of a request is ``tokens`` now."""
        self._selector.progress(admission.id, tokens)
        if admission.tracked and self._classifier is not None:
            self._classifier.progress(admission.id, tokens)

    def end(self, admission: Admission, completed: bool, reader: AnswerReader | None, cause: Cause) -> None:
        """See `Admission.ended`."""
        request = admission.request
        tokens = None
        if completed and reader is not None:
            tokens = context_tokens(reader, admission.input_tokens, self._bytes_per_token.ratio(request.model))
            if request.inference:
                self._learn(request, reader)
        self._selector.ended(admission.id)
        self._prefill.over(admission.id)
        if cause is not Cause.REFUSED:
            self._metrics.request(request.path, Outcome.COMPLETED if completed else Outcome.ABORTED)
        _log.debug(
            "ended",
            request=admission.id,
            session=request.session,
            cause=str(cause),
            input_tokens=admission.input_tokens,
            context_tokens=tokens,
        )
        self._holds.leave(admission.id)
        if not admission.tracked or self._classifier is None:
            return
        now = self._clock()
        if completed:
            self._carry_out(self._classifier.completed(admission.id, tokens, now))
        else:
            self._carry_out(self._classifier.aborted(admission.id, now))

    def _learn(self, request: InferenceRequest, reader: AnswerReader) -> None:
        usage = reader.usage
        if usage is None:
            self._metrics.missing_usage()
        elif usage.prompt_tokens is not None:
            self._bytes_per_token.observe(request.model, request.prompt_bytes, usage.prompt_tokens)

    # -- holds -----------------------------------------------------------------------------------------------------

    def _start_hold(self, admission: Admission, lifecycle: Lifecycle | None) -> None:
        assert self._classifier is not None
        if not self._holds.have_room(admission.body_bytes):
            self._carry_out(self._classifier.aborted(admission.id, self._clock()))
            raise Refused(Refusal.HOLD_LIMIT)
        hold_class = HoldClass.NEW
        if lifecycle is not None:
            hold_class = HoldClass.PAUSED if lifecycle is Lifecycle.PAUSED else HoldClass.CONTINUATION
        admission.hold = self._holds.start(admission.id, admission, admission.body_bytes, hold_class)
        _log.debug(
            "held",
            request=admission.id,
            session=admission.request.session,
            input_tokens=admission.input_tokens,
            hold_class=str(hold_class),
        )

    def _hold_timed_out(self, admission: Admission) -> None:
        assert self._snapshot is not None
        interval = self._snapshot.admission.scheduler_interval_seconds
        self._refuse_hold(admission, Refused(Refusal.HOLD_TIMEOUT, retry_after_seconds=interval))

    def _refuse_hold(self, admission: Admission, refused: Refused) -> None:
        self._end_hold(admission, refused)
        if self._classifier is not None:
            self._carry_out(self._classifier.aborted(admission.id, self._clock()))

    def _release_hold(self, admission: Admission, target: WorkerRank | None) -> None:
        try:
            placement = self._place(admission, target, self._candidates(admission.subset))
        except Refused as refused:
            self._refuse_hold(admission, refused)
        else:
            self._end_hold(admission, placement)

    def _end_hold(self, admission: Admission, outcome: Placement | Refused) -> None:
        hold = self._holds.leave(admission.id)
        assert hold is not None, "a hold ends once"
        hold.end(outcome)

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        """Count decisions and release what they release; a release that fails may lead to further decisions."""
        if self._carrying_out is not None:
            self._carrying_out.extend(decisions)
            return
        self._carrying_out = deque(decisions)
        try:
            while self._carrying_out:
                decision = self._carrying_out.popleft()
                self._metrics.decided((decision,))
                if isinstance(decision, Release):
                    hold = self._holds.get(decision.request)
                    # A request that ended in this very round, through another's failure, is no longer held.
                    if hold is not None:
                        self._release_hold(hold.admission, decision.worker)
        finally:
            self._carrying_out = None

    # -- policy ----------------------------------------------------------------------------------------------------

    def _configure(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        policy = snapshot.admission
        _log.info("policy in force", **policy_parameters(snapshot))
        if self._classifier is not None and before is not None and _ledgers(before) == _ledgers(snapshot):
            self._classifier.configure(policy)
            self._keep_ledgers(snapshot)
        else:
            # Other rules know nothing of the programs so far: what is held goes, what runs is no longer charged.
            self._classifier = pooled_rules(policy, snapshot.capacity, snapshot.disaggregation)
            for admission in self._holds.all():
                admission.tracked = False
                self._release_hold(admission, None)
        self._holds.limit(policy.max_hold_seconds)
        self._interval_changed.set()

    def _keep_ledgers(self, snapshot: Snapshot) -> None:
        if isinstance(self._classifier, TwoLedgers):
            self._classifier.snapshot(snapshot.capacity)
        elif self._classifier is not None:
            self._classifier.snapshot(_takers(snapshot))

    def _used(self, worker: WorkerRank) -> int:
        return 0 if self._classifier is None else self._classifier.used(worker)

    def _snapshot_status(self) -> SnapshotStatus | None:
        if self._snapshot is None:
            return None
        return SnapshotStatus(self._snapshot.id, self._clock() - self._applied_at)


def _takers(snapshot: Snapshot) -> CapacitySnapshot:
    """The workers a request may be sent to."""
    return snapshot.capacity if snapshot.disaggregation is None else decode_pool(snapshot.capacity)


def _ledgers(snapshot: Snapshot) -> tuple[str, RetentionPool]:
    """What decides which rules there are, and over which pools; aggregated workers are a decode pool by themselves."""
    terms = snapshot.disaggregation
    return snapshot.admission.policy, RetentionPool.DECODE if terms is None else terms.retention_pool
