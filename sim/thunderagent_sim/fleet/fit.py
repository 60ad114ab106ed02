"""How the service constants were fitted, and how well: ``python -m thunderagent_sim.fleet.fit [--search]``.

The default router's row of fleet.md's measurements is all that a fit may look at. Every other row of that table is
there to see, not to fit: the policies behind them are not the product's. Prints one line per cell, measured against
simulated; with ``--search`` it first walks from the present constants, one at a time, to smaller residuals, which
takes a quarter of an hour.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final

from thunderagent_sim.fleet.arms import ROUTERS
from thunderagent_sim.fleet.measures import Measures, measure
from thunderagent_sim.fleet.run import Fleet, Scenario
from thunderagent_sim.fleet.service import FITTED, Service
from thunderagent_sim.fleet.workload import CodingAgents

SEEDS: Final = (1, 2, 3, 4, 5)


@dataclass(frozen=True, slots=True)
class Cell:
    """The pool of four pods under the llm-d default, as measured on real hardware (fleet.md)."""

    sessions_per_pod: int
    output_tokens_per_second: float
    hit_rate: float
    inter_token_milliseconds: float | None


MEASURED: Final = (
    Cell(4, 1278, 0.947, 10),
    Cell(8, 1782, 0.953, 16),
    Cell(12, 2014, 0.952, 22),
    Cell(16, 1956, 0.930, 31),
    Cell(24, 1541, 0.625, 45),
    Cell(32, 1151, 0.040, 99),
    Cell(48, 1065, 0.003, 132),
    Cell(64, 999, 0.002, 145),
    Cell(84, 1050, 0.002, None),
)

_STEPS: Final = {
    "footprint": 0.02,
    "prefill_token_seconds": 0.04,
    "attention_seconds": 0.04,
    "decode_sequence_seconds": 0.05,
    "decode_context_seconds": 0.05,
    "step_seconds": 0.1,
}
"""What the search changes, and by which share at a time."""

_FITTING_SESSIONS: Final = 16
"""Up to here a pod holds all its sessions, and the time between tokens says what decoding costs. Beyond, it depends on
how many turns the real engine runs at once, which the model's whole-prompt reservations do not show."""


def simulated(service: Service, sessions_per_pod: int) -> Measures:
    """The default arm in one cell: of the seeds' runs, the one with the median throughput."""
    runs = [
        measure(Fleet(Scenario(sessions_per_pod, seed=seed, service=service), CodingAgents(), ROUTERS["prefix"]).run())
        for seed in SEEDS
    ]
    middle = median(run.output_tokens_per_second for run in runs)
    return next(run for run in runs if run.output_tokens_per_second == middle)


def cost(row: Iterable[tuple[Cell, Measures]]) -> float:
    """What the search makes small: squared residuals, relative ones of throughput and of the time between tokens."""
    total = 0.0
    for cell, run in row:
        total += (run.output_tokens_per_second / cell.output_tokens_per_second - 1) ** 2
        total += (run.hit_rate - cell.hit_rate) ** 2 / 2
        if cell.inter_token_milliseconds is not None and cell.sessions_per_pod <= _FITTING_SESSIONS:
            total += (run.inter_token_seconds * 1000 / cell.inter_token_milliseconds - 1) ** 2 / 4
    return total


def search(start: Service, rounds: int = 2) -> Service:
    """Walk from ``start``, one constant at a time, while that makes the cost smaller."""

    def cost_of(service: Service) -> float:
        return cost((cell, simulated(service, cell.sessions_per_pod)) for cell in MEASURED)

    best, best_cost = start, cost_of(start)
    for _ in range(rounds):
        before = best_cost
        for name, share in _STEPS.items():
            for factor in (1 + share, 1 - share):
                tried = best.model_copy(update={name: getattr(best, name) * factor})
                tried_cost = cost_of(tried)
                print(f"{name} {getattr(tried, name):.4g}: {tried_cost:.5f} (best {best_cost:.5f})", flush=True)  # noqa: T201
                if tried_cost < best_cost:
                    best, best_cost = tried, tried_cost
                    break
        if best_cost == before:
            break
    return best


def main(arguments: list[str]) -> None:
    """Print the residuals of the fitted constants, or of better ones."""
    service = search(FITTED) if "--search" in arguments else FITTED
    lines = [service.model_dump_json(), "sessions  tokens/s            hit rate        ms between tokens"]
    for cell in MEASURED:
        run = simulated(service, cell.sessions_per_pod)
        rate = run.output_tokens_per_second
        between = "-" if cell.inter_token_milliseconds is None else f"{cell.inter_token_milliseconds:.0f}"
        lines.append(
            f"{cell.sessions_per_pod:8}  {cell.output_tokens_per_second:4.0f} {rate:5.0f} "
            f"{rate / cell.output_tokens_per_second - 1:+6.1%}   {cell.hit_rate:.3f} {run.hit_rate:.3f}"
            f"     {between:>4} {run.inter_token_seconds * 1000:4.0f}"
        )
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
