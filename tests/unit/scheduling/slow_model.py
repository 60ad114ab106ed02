"""The rules of scheduling.md a second time, in the plainest Python that can state them.

The tests replay events through this model and through the real classifier and ask for the same decisions. Nothing
is kept that can be computed: every sum is taken over all programs whenever it is needed, and everything is sorted.
It shares no code with the classifier, so that a mistake must be made twice, in two ways, to go unseen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

Rank = tuple[str, int]
Event = dict[str, Any]
Decision = dict[str, Any]

DEFAULTS: dict[str, float] = {
    "pause_threshold": 0.95,
    "pause_target": 0.80,
    "resume_hysteresis": 0.10,
    "resume_timeout_seconds": 1800,
    "session_retention_seconds": 1800,
    "acting_token_weight": 1.0,
    "acting_decay_tau_seconds": 1.0,
    "buffer_per_program": 100,
    "max_tracked_requests": 10000,
}


@dataclass
class Program:
    status: str = "reasoning"
    lifecycle: str = "active"
    worker: Rank | None = None
    tokens: int = 0
    steps: int = 1
    marked: bool = False
    acting_since: float | None = None
    deferred_since: float | None = None


@dataclass
class Request:
    session: str
    input_tokens: int
    final: bool
    pinned: Rank | None
    live_size: int
    running: bool = False
    begun: bool = False
    before: Program | None = None


class SlowModel:
    """Give each event to `play`; ``t`` is in seconds, sizes are in tokens."""

    def __init__(self) -> None:
        self.parameters = dict(DEFAULTS)
        self.capacity: dict[Rank, int] = {}
        self.live: set[Rank] = set()
        self.incarnation: dict[Rank, str] = {}
        self.incarnation_settled: dict[Rank, str] = {}  # as of the last snapshot that was acted on
        self.snapshot_is_new = False
        self.programs: dict[str, Program] = {}
        self.requests: dict[str, Request] = {}  # in order of arrival
        self.now: float = 0
        self.decisions: list[Decision] = []

    def play(self, event: Event) -> list[Decision]:
        """The decisions one line of a trace leads to."""
        self.decisions = []
        self.now = event.get("t", self.now)
        getattr(self, event["event"])(event)
        return self.decisions

    def decide(self, decision: str, **fields: Any) -> None:
        if "worker" in fields:
            fields["worker"], fields["rank"] = fields["worker"] or (None, None)
        self.decisions.append({"decision": decision, "t": self.now, **fields})

    # What is looked up. Nothing of it is remembered.

    def turn(self, session: str) -> Request | None:
        """The one request of the session that has begun and not ended, if its program is still there."""
        for request in self.requests.values():
            if request.session == session and request.begun:
                return request
        return None

    def pin(self, session: str) -> Rank | None:
        """The only worker the program may be charged to while its turn waits."""
        turn = self.turn(session)
        return turn.pinned if turn else None

    def size(self, session: str) -> int:
        turn = self.turn(session)
        return turn.live_size if turn else self.programs[session].tokens

    def charge(self, session: str, decayed: bool = False) -> int:
        program = self.programs[session]
        weight = 1.0
        if program.acting_since is not None:
            weight = self.parameters["acting_token_weight"]
            if decayed:
                weight = 2 ** (-(self.now - program.acting_since) / self.parameters["acting_decay_tau_seconds"])
        return math.floor(self.size(session) * weight) + self.buffer

    def on(self, worker: Rank) -> list[str]:
        """The sessions of the programs charged to a worker, smallest first."""
        charged = [s for s, p in self.programs.items() if p.lifecycle == "active" and p.worker == worker]
        return sorted(charged, key=lambda s: (self.size(s), s))

    def used(self, worker: Rank, decayed: bool = False) -> int:
        return sum(self.charge(session, decayed) for session in self.on(worker))

    @property
    def usable(self) -> list[Rank]:
        return sorted(worker for worker in self.live if worker in self.capacity)

    @property
    def buffer(self) -> int:
        return int(self.parameters["buffer_per_program"])

    def idle(self) -> list[str]:
        """Programs without a request, those acting longest first."""
        busy = {request.session for request in self.requests.values()}
        return sorted(set(self.programs) - busy, key=lambda s: (self.programs[s].acting_since, s))

    # The events.

    def policy(self, event: Event) -> None:
        self.parameters |= event["parameters"]

    def snapshot(self, event: Event) -> None:
        self.capacity, self.live, self.incarnation, self.snapshot_is_new = {}, set(), {}, True
        for worker in event["workers"]:
            rank = (worker["worker"], worker.get("rank", 0))
            self.incarnation[rank] = worker.get("incarnation", "")
            if worker.get("live", True) or not event.get("liveness_known", True):
                self.live.add(rank)
            if worker.get("capacity_tokens") is not None:
                self.capacity[rank] = worker["capacity_tokens"]

    def arrive(self, event: Event) -> None:
        request, session, final = event["request"], event["session"], event.get("final", False)
        limit = self.parameters["max_tracked_requests"]
        if request in self.requests:
            return self.decide("reject", request=request, reason="duplicate_request")
        if len(self.requests) >= limit:
            return self.decide("reject", request=request, reason="request_limit")
        if not final and session not in self.programs and len(self.programs) >= limit:
            if not self.idle():
                return self.decide("reject", request=request, reason="program_limit")
            del self.programs[self.idle()[0]]
        self.forget()
        pinned = event.get("pinned")
        self.requests[request] = Request(
            session=session,
            input_tokens=event["input_tokens"],
            final=final,
            pinned=(pinned["worker"], pinned.get("rank", 0)) if pinned else None,
            live_size=event["input_tokens"],
        )
        self.admit(session)
        return None

    def sent(self, event: Event) -> None:
        request = self.requests.get(event["request"])
        if request and request.running and request.begun:
            self.programs[request.session].worker = (event["worker"], event.get("rank", 0))

    def progress(self, event: Event) -> None:
        request = self.requests.get(event["request"])
        if request:
            request.live_size = max(request.live_size, event["context_tokens"])

    def completed(self, event: Event) -> None:
        request = self.requests.get(event["request"])
        if request is None:
            return None
        if not request.running:
            return self.aborted(event)
        del self.requests[event["request"]]
        if request.begun:
            program = self.programs[request.session]
            given = event.get("context_tokens")
            program.tokens = request.live_size if given is None else given
            program.status, program.acting_since = "acting", self.now
            if program.marked:
                program.marked, program.lifecycle, program.worker = False, "paused", None
        self.admit(request.session)
        return None

    def aborted(self, event: Event) -> None:
        request = self.requests.pop(event["request"], None)
        if request is None:
            return
        if request.begun:
            if request.before is None:
                del self.programs[request.session]
            else:
                self.programs[request.session] = request.before
        self.admit(request.session)

    def dump(self, event: Event) -> None:
        programs = {}
        for session, program in self.programs.items():
            name, rank = program.worker or (None, None)
            programs[session] = {
                "status": program.status,
                "lifecycle": program.lifecycle,
                "worker": name,
                "rank": rank,
                "tokens": self.size(session),
                "steps": program.steps,
                "marked": program.marked,
            }
        workers = sorted({p.worker for p in self.programs.values() if p.worker})
        used = {f"{worker[0]}/{worker[1]}": self.used(worker) for worker in workers}
        waiting = sorted(name for name, request in self.requests.items() if not request.running)
        self.decide(
            "state",
            programs=programs,
            used={worker: tokens for worker, tokens in used.items() if tokens},
            waiting=waiting,
            tracked=len(self.requests),
        )

    def tick(self, event: Event) -> None:
        if not self.programs:
            return
        self.forget()
        for session in sorted({request.session for request in self.requests.values()}):
            self.admit(session)
        self.resume()
        self.force()
        self.pause()

    # The rules.

    def forget(self) -> None:
        """Drop programs past retention; take programs off workers that are gone."""
        for session in self.idle():
            idle_seconds = self.now - self.programs[session].acting_since  # type: ignore[operator]
            if idle_seconds >= self.parameters["session_retention_seconds"]:
                del self.programs[session]
        if self.snapshot_is_new:
            for program in self.programs.values():
                if program.worker not in self.live or self.restarted(program.worker):
                    program.worker = None
            self.incarnation_settled = self.incarnation
        self.snapshot_is_new = False

    def restarted(self, worker: Rank | None) -> bool:
        if worker is None or worker not in self.incarnation_settled:
            return False
        return self.incarnation_settled[worker] != self.incarnation[worker]

    def admit(self, session: str) -> None:
        queue = [name for name, r in self.requests.items() if r.session == session]
        if not queue or any(self.requests[name].running for name in queue):
            return None
        name, request = queue[0], self.requests[queue[0]]
        program = self.programs.get(session)
        if request.final:
            if program:
                del self.programs[session]
            request.running = True
            return self.decide("release", request=name, worker=program.worker if program else None)
        if not request.begun:
            self.begin(request)
        program = self.programs[session]
        if program.lifecycle == "paused":
            return self.defer(program)
        if not self.usable:
            return self.release(session, program.worker if program.worker in self.live else None)
        if program.worker in self.live:
            return self.release(session, program.worker)
        program.worker = None
        if request.before is None and any(p.lifecycle == "paused" for p in self.programs.values()):
            return self.defer(program)
        need = request.input_tokens + self.buffer
        fitting = [worker for worker in self.usable if self.capacity[worker] - self.used(worker) >= need]
        if request.pinned:
            fitting = [worker for worker in fitting if worker == request.pinned]
        if not fitting:
            return self.defer(program)
        return self.release(session, min(fitting, key=lambda worker: (self.used(worker), worker)))

    def begin(self, request: Request) -> None:
        request.begun = True
        program = self.programs.get(request.session)
        if program is None:
            self.programs[request.session] = Program(tokens=request.input_tokens)
            return
        request.before = replace(program)
        program.status, program.acting_since = "reasoning", None
        program.steps += 1
        if request.input_tokens > 0:
            program.tokens = request.input_tokens

    def defer(self, program: Program) -> None:
        program.lifecycle, program.worker = "paused", None
        if program.deferred_since is None:
            program.deferred_since = self.now

    def release(self, session: str, worker: Rank | None) -> None:
        """Activate a program on a worker; the turn that waits for it, if there is one, runs."""
        program = self.programs[session]
        program.lifecycle, program.deferred_since, program.worker = "active", None, worker
        for name, request in self.requests.items():
            if request.session == session and request.begun and not request.running:
                request.running = True
                self.decide("release", request=name, worker=worker)

    def paused(self) -> list[str]:
        return sorted(session for session, program in self.programs.items() if program.lifecycle == "paused")

    def resume(self) -> None:
        share = self.parameters["pause_threshold"] - self.parameters["resume_hysteresis"]
        room = {worker: math.floor(self.capacity[worker] * share) - self.used(worker) for worker in self.usable}
        room = {worker: tokens for worker, tokens in room.items() if tokens > self.buffer}

        def group(session: str) -> int:
            program = self.programs[session]
            if program.steps <= 1:
                return 1
            return 0 if program.status == "reasoning" else 2

        total, taken = sum(room.values()), []
        for session in sorted(self.paused(), key=lambda s: (group(s), self.size(s), s)):
            if self.size(session) + self.buffer <= total:
                total -= self.size(session) + self.buffer
                taken.append(session)
        for session in sorted(taken, key=lambda s: (-self.size(s), s)):
            need = self.size(session) + self.buffer
            holding = [worker for worker in room if room[worker] >= need and self.pin(session) in (None, worker)]
            if not holding:
                continue
            worker = min(holding, key=lambda w: (-room[w], w))
            room[worker] -= need
            if room[worker] <= self.buffer:
                del room[worker]
            self.decide("resume", session=session, worker=worker, forced=False)
            self.release(session, worker)

    def force(self) -> None:
        overdue = []
        for session in self.paused():
            since = self.programs[session].deferred_since
            if since is not None and self.now - since >= self.parameters["resume_timeout_seconds"]:
                overdue.append((since, session))
        for _, session in sorted(overdue):
            spare = [(self.used(w, decayed=True) - self.capacity[w], w) for w in self.usable]
            worker = self.pin(session) or (min(spare)[1] if spare else None)
            if not self.live or (worker is not None and worker not in self.live):
                continue
            self.decide("resume", session=session, worker=worker, forced=True)
            self.release(session, worker)

    def pause(self) -> None:
        for worker in sorted(self.capacity):
            if self.used(worker) <= math.floor(self.capacity[worker] * self.parameters["pause_threshold"]):
                continue
            target = math.floor(self.capacity[worker] * self.parameters["pause_target"])
            for session in self.on(worker):
                program = self.programs[session]
                if program.status == "acting" and self.used(worker) > target:
                    self.decide("pause", session=session, worker=worker)
                    program.lifecycle, program.worker = "paused", None
            if self.used(worker) > target:
                for session in self.on(worker):
                    program = self.programs[session]
                    if program.status == "reasoning" and not program.marked:
                        program.marked = True
                        self.decide("mark", session=session, worker=worker)
