"""Turns and pods for tests of the simulated fleet, with numbers that can be reckoned by hand."""

from __future__ import annotations

from thunderagent_sim.fleet.engine import Engine
from thunderagent_sim.fleet.service import Service
from thunderagent_sim.fleet.turns import PlannedTurn, Turn

SERVICE = Service(
    step_seconds=0.01,
    prefill_token_seconds=0.001,
    attention_seconds=1e-6,
    decode_sequence_seconds=0.002,
    decode_context_seconds=1e-5,
    blocks=1000,
    block_size=10,
    footprint=1.0,
    max_batched_tokens=100,
    max_num_seqs=50,
)


def turn(
    session: str,
    prompt: int,
    output: int,
    *,
    number: int = 1,
    shared: int = 0,
    arrived: float = 0.0,
    seat: int = 0,
    overlaps: bool = False,
    last: bool = False,
) -> Turn:
    plan = PlannedTurn(prompt, shared, output, overlaps=overlaps, last=last)
    return Turn(f"{session}-{number}", session, seat, number, plan, arrived)


def small_pods(pods: int, capacity_tokens: int) -> list[Engine]:
    service = SERVICE.model_copy(update={"blocks": capacity_tokens // SERVICE.block_size})
    return [Engine(service) for _ in range(pods)]


def run_until_idle(engine: Engine) -> list[tuple[float, str]]:
    """Let an engine work off what it has: when each turn ended."""
    ends = []
    engine.settle(0.0)
    while engine.next_event < float("inf"):
        now = engine.next_event
        _, ended = engine.finish()
        ends += [(round(now, 9), one.id) for one in ended]
        engine.settle(now)
    return ends
