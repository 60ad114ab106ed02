"""Random traces of events: few ids, few workers, few sizes, so that everything collides with everything.

The events are the lines of a trace (scheduling.md, *Replay*), with two more fields a trace cannot have but a feed can:
``liveness_known`` of a snapshot and ``incarnation`` of a worker. `traces` leaves them out when asked to.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Event = dict[str, Any]

REQUESTS = [f"r{number}" for number in range(1, 17)]
SESSIONS = ["s1", "s2", "s3", "s4", "s10", "s20", "s21"]
WORKERS = [("a", 0), ("a", 1), ("b", 0), ("b", 10)]
SMALL, LARGE = [250, 500, 1000], [1500, 3000]

# Strategies are made once: making one costs far more than drawing from it.
indices = st.integers(0, 10_000)
sizes = st.sampled_from([0, 1, 40, 100, 100, 300, 700, 1500])
pauses = st.sampled_from([0, 0, 0, 0.25, 0.25, 1, 1, 2, 5, 12])
sessions = st.sampled_from(SESSIONS)
places = st.sampled_from([{"worker": worker, "rank": rank} for worker, rank in WORKERS])
crews = st.permutations(WORKERS)
crew_sizes = st.sampled_from([2, 1, 3, 4, 4, 3, 2, 0])
capacities = {
    "any": st.sampled_from([None, 0, *SMALL, *LARGE, *LARGE]),
    "small": st.sampled_from(SMALL),
    "large": st.sampled_from(LARGE),
}
mostly = st.sampled_from([True] * 5 + [False])
seldom = st.sampled_from([False] * 9 + [True])
kinds = st.sampled_from(
    [
        *["arrive"] * 9,
        *["completed"] * 7,
        *["tick"] * 5,
        *["progress"] * 2,
        *["sent"] * 2,
        *["aborted"] * 3,
        *["snapshot"] * 1,
    ]
)
thresholds = st.sampled_from([0.95, 0.95, 0.95, 0.5, 0.5, 1.0, 0.9, 0.0])
targets = st.sampled_from([0.8, 0.4, 0.57, 0.0])
hystereses = st.sampled_from([0.1, 0.0, 0.3])
parameters = st.fixed_dictionaries(
    {
        "resume_timeout_seconds": st.sampled_from([1800.0, 5.0, 5.0, 20.0]),
        "session_retention_seconds": st.sampled_from([1800.0, 1800.0, 1800.0, 10.0, 30.0]),
        "acting_token_weight": st.sampled_from([1.0, 0.1, 0.5, 1.5]),
        "acting_decay_tau_seconds": st.sampled_from([1.0, 0.25, 10.0]),
        "buffer_per_program": st.sampled_from([0, 7, 100]),
        "max_tracked_requests": st.sampled_from([10000] * 7 + [2, 3, 6]),
    }
)


def _policy(draw: st.DrawFn) -> Event:
    threshold = draw(thresholds)
    shares = {
        "pause_threshold": threshold,
        "pause_target": min(draw(targets), threshold),
        "resume_hysteresis": min(draw(hystereses), threshold),
    }
    return {"event": "policy", "parameters": shares | draw(parameters)}


def _snapshot(draw: st.DrawFn, replayable: bool, size: str = "any") -> Event:
    workers = []
    for name, rank in draw(crews)[: draw(crew_sizes)]:
        worker: Event = {"worker": name, "rank": rank, "capacity_tokens": draw(capacities[size]), "live": draw(mostly)}
        if not replayable:
            worker["incarnation"] = "restarted" if draw(seldom) else ""
        workers.append(worker)
    if replayable:
        return {"event": "snapshot", "workers": workers}
    return {"event": "snapshot", "workers": workers, "liveness_known": draw(mostly)}


def _event(draw: st.DrawFn, replayable: bool, tracked: list[str]) -> Event:
    """Any event; a request that arrives mostly has a new id, and other events mostly are of a tracked request."""
    kind = draw(kinds)
    if kind == "snapshot":
        return _snapshot(draw, replayable)
    if kind == "tick":
        return {"event": "tick"}
    likely = [request for request in REQUESTS if request not in tracked] if kind == "arrive" else tracked
    choices = [*likely * 5, *REQUESTS]
    event: Event = {"event": kind, "request": choices[draw(indices) % len(choices)]}
    if kind == "arrive":
        event |= {"session": draw(sessions), "input_tokens": draw(sizes), "final": draw(seldom)}
        if not draw(mostly):
            event["pinned"] = draw(places)
    elif kind == "sent":
        event |= draw(places)
    elif kind == "progress" or (kind == "completed" and draw(mostly)):
        event["context_tokens"] = draw(sizes)
    return event


def _crowd(draw: st.DrawFn, replayable: bool) -> list[Event]:
    """Several sessions in or after their first turn, then workers that shrink and grow with a tick after each.

    Chance alone seldom makes many programs idle, and pressure and room are only met where many are.
    """
    crowd = [_snapshot(draw, replayable, "large")]
    for request, session in zip(REQUESTS, SESSIONS, strict=False):
        arrival = {"event": "arrive", "request": request, "session": session, "final": False}
        crowd.append(arrival | {"input_tokens": draw(sizes)})
        if draw(mostly):
            crowd.append({"event": "completed", "request": request, "context_tokens": draw(sizes)})
    for size in ("small", "large"):
        crowd += [_snapshot(draw, replayable, size), {"event": "tick"}]
    return crowd


@st.composite
def traces(draw: st.DrawFn, replayable: bool = False) -> list[Event]:
    """A policy, then up to 100 events, time going on by 0 to 12 seconds with each."""
    trace = [_policy(draw), _snapshot(draw, replayable)]
    tracked: list[str] = []
    now = 0.0
    crowd = _crowd(draw, replayable) if draw(st.booleans()) else []
    for number in range(len(crowd) + draw(st.sampled_from([10, 40, 80]))):
        now += draw(pauses)
        event = crowd[number] if number < len(crowd) else _event(draw, replayable, tracked)
        trace.append(event | {"t": now})
        if event["event"] == "arrive":
            tracked.append(event["request"])
        elif event["event"] in ("completed", "aborted") and event["request"] in tracked:
            tracked.remove(event["request"])
    return trace
