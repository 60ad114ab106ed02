"""What decides about the turns of a run: plain routers, and the product's own classifier and selector.

An arm is told of every turn's arrival, first token and end, and answers with what is to be sent where; what it does
not send yet, it holds. The program-aware arm does for the simulated fleet what `extproc/director.py` does for Envoy:
it gives the very same classifier and selector the same events in the same order, with simulated time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.scheduling.decisions import Decision, Mark, Pause, Reject, Release, Resume
from thunderagent_epp.scheduling.policies import admission_rules
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.rules import AdmissionRules
from thunderagent_epp.scheduling.selector import Selector
from thunderagent_sim.fleet.engine import Engine
from thunderagent_sim.fleet.turns import Turn


class Dispatch(NamedTuple):
    """A turn goes to a pod now."""

    turn: Turn
    pod: int


class Observed(NamedTuple):
    """A decision of a policy, for those who watch: resumes, pauses and marks of programs."""

    time: float
    pod: int | None
    """The pod it is about; None where the decision leaves it open."""
    decision: Decision


class Arm(Protocol):
    """Holds and places turns. Times are simulated seconds; each call answers with the turns to send now."""

    @property
    def tick_seconds(self) -> float | None:
        """How often `tick` is due; None for never."""

    def arrive(self, turn: Turn, now: float) -> Iterable[Dispatch]:
        """A turn of a session is there."""

    def responding(self, turn: Turn) -> None:
        """A turn's first token is there."""

    def ended(self, turn: Turn, now: float) -> Iterable[Dispatch]:
        """A turn's answer is complete."""

    def lost(self, turns: Sequence[Turn], pod: int, now: float) -> Iterable[Dispatch]:
        """A pod is gone and with it the turns it had; each of them arrives again."""

    def returned(self, pod: int) -> None:
        """A pod that was lost is back, empty."""

    def tick(self, now: float) -> Iterable[Dispatch]:
        """What is due every `tick_seconds`."""

    def charged_tokens(self, pod: int) -> int:
        """Tokens that the arm counts as a pod's; 0 for an arm that does not count."""


MakeArm = Callable[[Sequence[Engine]], Arm]
"""An arm looks at the engines as a router does: at what they report."""


class _Router:
    """What routers that hold nothing have in common."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._lost: list[int] = []

    @property
    def tick_seconds(self) -> float | None:
        return None

    def arrive(self, turn: Turn, now: float) -> Iterable[Dispatch]:
        return (Dispatch(turn, self._pick(turn)),)

    def responding(self, turn: Turn) -> None:
        pass

    def ended(self, turn: Turn, now: float) -> Iterable[Dispatch]:
        return ()

    def lost(self, turns: Sequence[Turn], pod: int, now: float) -> Iterable[Dispatch]:
        self._lost.append(pod)
        return ()

    def returned(self, pod: int) -> None:
        self._lost.remove(pod)

    def tick(self, now: float) -> Iterable[Dispatch]:
        return ()

    def charged_tokens(self, pod: int) -> int:
        return 0

    def _live(self) -> Iterator[int]:
        return (pod for pod in range(len(self._engines)) if pod not in self._lost)

    def _least_loaded(self) -> int:
        engines = self._engines
        return min(self._live(), key=lambda pod: (engines[pod].waiting + engines[pod].running, pod))

    def _pick(self, turn: Turn) -> int:
        raise NotImplementedError


class LeastLoaded(_Router):
    """``load``: the pod with the fewest turns, ties by pod."""

    def _pick(self, turn: Turn) -> int:
        return self._least_loaded()


class Affinity(_Router):
    """``affinity``: the pod of the session's last turn; the least loaded for a new session."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self._homes: dict[str, int] = {}

    def lost(self, turns: Sequence[Turn], pod: int, now: float) -> Iterable[Dispatch]:
        """The sessions that were there have no home."""
        self._homes = {session: home for session, home in self._homes.items() if home != pod}
        return super().lost(turns, pod, now)

    def ended(self, turn: Turn, now: float) -> Iterable[Dispatch]:
        """Forget the session with its last turn."""
        if turn.plan.last:
            self._homes.pop(turn.session, None)
        return ()

    def _pick(self, turn: Turn) -> int:
        home = self._homes.get(turn.session)
        if home is None:
            home = self._homes[turn.session] = self._least_loaded()
        return home


class PrefixScorer(_Router):
    """``prefix``: the sum of three scores from 0 to 1, as llm-d adds them up by default.

    Prefix, weight 3: the share of the prompt that the router believes to be cached on a pod, from an index of what it
    sent there, as large as the pod's cache and as unaware of what the pod really evicted. Queue, weight 2: 1 for the
    pod with the shortest waiting queue, 0 for the longest, linear between. Cache, weight 2: the share of blocks that
    no running turn holds. Ties by pod.
    """

    PREFIX_WEIGHT, QUEUE_WEIGHT, CACHE_WEIGHT = 3.0, 2.0, 2.0

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self._indices: list[OrderedDict[str, int]] = [OrderedDict() for _ in engines]
        self._indexed = [0 for _ in engines]

    def lost(self, turns: Sequence[Turn], pod: int, now: float) -> Iterable[Dispatch]:
        """Nothing is cached there any more."""
        self._indices[pod].clear()
        self._indexed[pod] = 0
        return super().lost(turns, pod, now)

    def _pick(self, turn: Turn) -> int:
        engines = self._engines
        queues = [engine.waiting for engine in engines]
        live = list(self._live())
        shortest = min(queues[pod] for pod in live)
        spread = max(queues[pod] for pod in live) - shortest
        best, best_score = live[0], -1.0
        for pod in live:
            believed = min(self._indices[pod].get(turn.session, 0), turn.plan.shared_tokens)
            queue = 1.0 if not spread else 1.0 - (queues[pod] - shortest) / spread
            score = (
                self.PREFIX_WEIGHT * believed / turn.plan.prompt_tokens
                + self.QUEUE_WEIGHT * queue
                + self.CACHE_WEIGHT * (1.0 - engines[pod].usage)
            )
            if score > best_score:
                best, best_score = pod, score
        self._remember(best, turn)
        return best

    def _remember(self, pod: int, turn: Turn) -> None:
        index = self._indices[pod]
        self._indexed[pod] += turn.plan.prompt_tokens - index.pop(turn.session, 0)
        index[turn.session] = turn.plan.prompt_tokens
        service = self._engines[pod].service
        while self._indexed[pod] > service.blocks * service.block_size:
            self._indexed[pod] -= index.popitem(last=False)[1]


MakeRules = Callable[[AdmissionPolicy, CapacitySnapshot], AdmissionRules[Any] | None]
"""The rules of a policy, none when its admission is disabled."""


class ProgramAware:
    """Admission by an `AdmissionPolicy`, placement by the selector.

    ``ledger_share`` is the share of each context that the rules are told of: 1 for a ledger that is right, 0.9
    for one that is a tenth short. ``announce_ends`` marks each session's last turn as final.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        policy: AdmissionPolicy,
        *,
        make_rules: MakeRules = admission_rules,
        ledger_share: float = 1.0,
        announce_ends: bool = False,
        observe: Callable[[Observed], None] | None = None,
    ) -> None:
        self._engines = engines
        self._share = ledger_share
        self._announce_ends = announce_ends
        self._observe = observe
        digits = len(str(len(engines) - 1))
        self.workers = [WorkerRank(f"pod-{pod:0{digits}}") for pod in range(len(engines))]
        self._pods = {worker: pod for pod, worker in enumerate(self.workers)}
        self._dead: list[int] = []
        self._incarnations = [0 for _ in engines]
        snapshot = self._snapshot()
        self._rules = make_rules(policy, snapshot)
        self._selector = Selector(snapshot)
        self._turns: dict[str, Turn] = {}
        self._sent: dict[str, Turn] = {}

    @property
    def tick_seconds(self) -> float | None:
        """How often the policy looks at what time alone has changed."""
        return None if self._rules is None else self._rules.interval_seconds

    def charged_tokens(self, pod: int) -> int:
        """Tokens the ledger charges to a pod."""
        return 0 if self._rules is None else self._rules.used(self.workers[pod])

    def arrive(self, turn: Turn, now: float) -> Iterable[Dispatch]:
        """Ask the rules."""
        self._turns[turn.id] = turn
        if self._rules is None:
            return [self._place(turn, None)]
        final = self._announce_ends and turn.plan.last
        tokens = self._told(turn.plan.prompt_tokens)
        return self._carry_out(self._rules.arrive(turn.id, turn.session, tokens, now, final=final), now)

    def responding(self, turn: Turn) -> None:
        """Prefill is over."""
        self._selector.responding(turn.id)

    def ended(self, turn: Turn, now: float) -> Iterable[Dispatch]:
        """The answer's usage says how large the context is."""
        del self._turns[turn.id]
        del self._sent[turn.id]
        self._selector.ended(turn.id)
        if self._rules is None:
            return ()
        return self._carry_out(self._rules.completed(turn.id, self._told(turn.plan.context_tokens), now), now)

    def lost(self, turns: Sequence[Turn], pod: int, now: float) -> Iterable[Dispatch]:
        """Every turn that was there is aborted, the pod is live no longer."""
        self._dead.append(pod)
        self._take_snapshot()
        dispatches: list[Dispatch] = []
        for turn in turns:
            del self._turns[turn.id]
            del self._sent[turn.id]
            self._selector.ended(turn.id)
            if self._rules is not None:
                dispatches += self._carry_out(self._rules.aborted(turn.id, now), now)
        return dispatches

    def returned(self, pod: int) -> None:
        """It is live again, another incarnation."""
        self._dead.remove(pod)
        self._incarnations[pod] += 1
        self._take_snapshot()

    def tick(self, now: float) -> Iterable[Dispatch]:
        """Tell of every answer's progress, as its stream would have, then let the policy do what is due."""
        if self._rules is None:
            return ()
        for turn in self._sent.values():
            assert turn.pod is not None
            tokens = self._told(turn.plan.prompt_tokens + self._engines[turn.pod].generated_of(turn, now))
            self._selector.progress(turn.id, tokens)
            self._rules.progress(turn.id, tokens)
        return self._carry_out(self._rules.tick(now), now)

    def _told(self, tokens: int) -> int:
        return tokens if self._share == 1.0 else round(tokens * self._share)

    def _snapshot(self) -> CapacitySnapshot:
        return CapacitySnapshot(
            tuple(
                Worker(
                    worker,
                    capacity_tokens=engine.service.capacity_tokens,
                    live=pod not in self._dead,
                    incarnation=str(self._incarnations[pod]),
                    block_size=engine.service.block_size,
                )
                for pod, (worker, engine) in enumerate(zip(self.workers, self._engines, strict=True))
            )
        )

    def _take_snapshot(self) -> None:
        snapshot = self._snapshot()
        self._selector.snapshot(snapshot)
        if self._rules is not None:
            self._rules.snapshot(snapshot)

    def _carry_out(self, decisions: Iterable[Decision], now: float) -> list[Dispatch]:
        dispatches: list[Dispatch] = []
        due = deque(decisions)
        while due:
            decision = due.popleft()
            match decision:
                case Release(request=request, worker=worker):
                    turn = self._turns[request]
                    dispatches.append(self._place(turn, worker))
                case Reject():
                    raise RuntimeError(f"{decision.request}: {decision.reason}; raise max_tracked_requests")
                case Resume() | Pause() | Mark() if self._observe is not None:
                    pod = None if decision.worker is None else self._pods[decision.worker]
                    self._observe(Observed(now, pod, decision))
        return dispatches

    def _place(self, turn: Turn, target: WorkerRank | None) -> Dispatch:
        worker = self._selector.pick(target)
        assert worker is not None, "some pod is always live"
        self._selector.started(turn.id, worker, self._told(turn.plan.prompt_tokens))
        if self._rules is not None:
            self._rules.sent(turn.id, worker)
        self._sent[turn.id] = turn
        return Dispatch(turn, self._pods[worker])


ROUTERS: dict[str, MakeArm] = {"load": LeastLoaded, "affinity": Affinity, "prefix": PrefixScorer}
"""The arms that need no policy file, by name."""
