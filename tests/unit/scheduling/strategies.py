"""Random traces of events: few ids, few workers, few sizes, so that everything collides with everything.

The events are the lines of a trace (scheduling.md, *Replay*), with two more fields a trace cannot have but a feed can:
``liveness_known`` of a snapshot and ``incarnation`` of a worker. `replayable` leaves them out.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Event = dict[str, Any]

REQUESTS = [f"r{number}" for number in range(1, 17)]
SESSIONS = ["s1", "s2", "s3", "s4", "s10", "s20", "s21"]
WORKERS = [("a", 0), ("a", 1), ("b", 0), ("b", 10)]
SIZES = [0, 1, 40, 100, 100, 300, 700, 1500]
CAPACITIES = [None, 0, 250, 500, 1000, 1000, 1500, 3000]
STEPS = [0, 0, 0, 0, 0.25, 1, 1, 2, 5, 12]
KINDS = [
    *["arrive"] * 9,
    *["completed"] * 7,
    *["tick"] * 5,
    *["progress"] * 2,
    *["sent"] * 2,
    *["aborted"] * 3,
    *["snapshot"] * 2,
]

sizes = st.sampled_from(SIZES)
places = st.builds(lambda place: {"worker": place[0], "rank": place[1]}, st.sampled_from(WORKERS))
"""A worker's name and rank, as a trace has them; not every one is in every snapshot."""


@st.composite
def policies(draw: st.DrawFn) -> Event:
    """Parameters of a policy, its bounds and relations kept."""
    threshold = draw(st.sampled_from([0.95, 0.5, 1.0, 0.9, 0.0]))
    parameters = {
        "pause_threshold": threshold,
        "pause_target": draw(st.sampled_from([share for share in (0.8, 0.4, 0.57, 0.0) if share <= threshold])),
        "resume_hysteresis": draw(st.sampled_from([share for share in (0.1, 0.0, 0.3) if share <= threshold])),
        "resume_timeout_seconds": draw(st.sampled_from([1800.0, 5.0, 20.0])),
        "session_retention_seconds": draw(st.sampled_from([1800.0, 10.0, 30.0])),
        "acting_token_weight": draw(st.sampled_from([1.0, 0.1, 0.5, 1.5])),
        "acting_decay_tau_seconds": draw(st.sampled_from([1.0, 0.25, 10.0])),
        "buffer_per_program": draw(st.sampled_from([0, 7, 100])),
        "max_tracked_requests": draw(st.sampled_from([10000, 10000, 2, 3, 6])),
    }
    return {"event": "policy", "parameters": parameters}


@st.composite
def snapshots(draw: st.DrawFn, replayable: bool) -> Event:
    workers = []
    for name, rank in draw(
        st.lists(st.sampled_from(WORKERS), unique=True, min_size=draw(st.sampled_from([0, 1, 1, 2])), max_size=4)
    ):
        worker: Event = {
            "worker": name,
            "rank": rank,
            "capacity_tokens": draw(st.sampled_from(CAPACITIES)),
            "live": draw(st.sampled_from([True, True, True, False])),
        }
        if not replayable:
            worker["incarnation"] = draw(st.sampled_from(["", "", "", "restarted"]))
        workers.append(worker)
    event: Event = {"event": "snapshot", "workers": workers}
    if not replayable:
        event["liveness_known"] = draw(st.sampled_from([True, True, True, False]))
    return event


@st.composite
def events(draw: st.DrawFn, tracked: list[str], replayable: bool) -> Event:
    """Any event; a request that arrives mostly has a new id, and other events mostly are of a tracked request."""
    kind = draw(st.sampled_from(KINDS))
    if kind == "snapshot":
        return draw(snapshots(replayable))
    if kind == "tick":
        return {"event": "tick"}
    event: Event = {"event": kind}
    likely = [request for request in REQUESTS if request not in tracked] if kind == "arrive" else tracked
    event["request"] = draw(st.sampled_from([*likely * 5, *REQUESTS]))
    if kind == "arrive":
        event["session"] = draw(st.sampled_from(SESSIONS))
        event["input_tokens"] = draw(sizes)
        event["final"] = draw(st.sampled_from([False] * 9 + [True]))
        if draw(st.sampled_from([False] * 5 + [True])):
            event["pinned"] = draw(places)
    elif kind == "sent":
        event |= draw(places)
    elif kind == "progress" or (kind == "completed" and draw(st.sampled_from([True, True, False]))):
        event["context_tokens"] = draw(sizes)
    return event


@st.composite
def traces(draw: st.DrawFn, replayable: bool = False) -> list[Event]:
    """A policy, then up to 80 events, time going on by 0 to 12 seconds with each."""
    trace = [draw(policies()), draw(snapshots(replayable))]
    tracked: list[str] = []
    now = 0.0
    for _ in range(draw(st.sampled_from([10, 40, 80]))):
        now += draw(st.sampled_from(STEPS))
        event = draw(events(tracked, replayable))
        trace.append(event | {"t": now})
        if event["event"] == "arrive":
            tracked.append(event["request"])
        elif event["event"] in ("completed", "aborted") and event["request"] in tracked:
            tracked.remove(event["request"])
    return trace
