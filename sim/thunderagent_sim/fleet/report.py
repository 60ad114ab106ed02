"""The results of a study as people and programs read them: table, JSON, CSV. `plots.py` draws them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import msgspec
from rich import box
from rich.table import Table

from thunderagent_sim.fleet.arms import Observed
from thunderagent_sim.fleet.measures import Hold, Measures
from thunderagent_sim.fleet.run import Sample, Scenario

BASELINE: Final = "prefix"
"""The arm that others are compared with, where it is among them."""

JSON_MEASURES: Final = (
    "output_tokens_per_second",
    "hit_rate",
    "ttft_p50",
    "ttft_p99",
    "turns",
    "holds",
    "hold_p99",
    "longest_hold",
)
_DIGITS: Final = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one arm: its numbers, and what the plots need beside them."""

    arm: str
    sessions_per_pod: int
    measures: Measures
    first_token_seconds: Sequence[float]
    holds: Sequence[Hold]
    samples: Sequence[Sample]
    decisions: Sequence[Observed]


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What ``--json`` prints: by arm and sessions per pod."""
    arms: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        numbers = _numbers(outcome.measures)
        arms.setdefault(outcome.arm, {})[str(outcome.sessions_per_pod)] = {
            name: numbers[name] for name in JSON_MEASURES
        }
    return {"arms": arms}


def write_results(directory: Path, outcomes: Sequence[Outcome], scenario: Scenario, workload: str) -> None:
    """Write ``results.json`` and ``results.csv``, with every measure and what it was measured on."""
    arms: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        arms.setdefault(outcome.arm, {})[str(outcome.sessions_per_pod)] = _numbers(outcome.measures)
    conditions = {
        "pods": scenario.pods,
        "minutes": scenario.minutes,
        "warmup_minutes": scenario.warmup_minutes,
        "seed": scenario.seed,
        "workload": workload,
        "engine": scenario.service.model_dump(),
    }
    text = msgspec.json.format(msgspec.json.encode(conditions | {"arms": arms}), indent=2)
    (directory / "results.json").write_bytes(text + b"\n")
    names = [field.name for field in fields(Measures)]
    with (directory / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "sessions_per_pod", *names])
        for outcome in outcomes:
            numbers = _numbers(outcome.measures)
            writer.writerow([outcome.arm, outcome.sessions_per_pod, *(numbers[name] for name in names)])


def table(outcomes: Sequence[Outcome], scenario: Scenario, workload: str) -> Table:
    """One line for each run; throughput against the baseline's where that was run."""
    counted = f"minutes {scenario.warmup_minutes:g}–{scenario.minutes:g}"
    title = f"{workload} on {scenario.pods} simulated pods, {counted}, seed {scenario.seed}"
    drawn = Table(title=title, box=box.SIMPLE_HEAD, padding=0, caption="times in seconds", title_justify="left")
    drawn.add_column("per\npod", justify="right", no_wrap=True)
    drawn.add_column("\narm", no_wrap=True)
    for heading in ("tokens\n/s", f"over\n{BASELINE}", "hit\nrate", "first\np50", "token\np90", "\np99", "\nholds"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for heading in ("hold\np99", "\nlongest", "\nJain"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    baseline = {
        outcome.sessions_per_pod: outcome.measures.output_tokens_per_second
        for outcome in outcomes
        if outcome.arm == BASELINE
    }
    ordered = sorted(outcomes, key=lambda outcome: outcome.sessions_per_pod)
    for index, outcome in enumerate(ordered):
        one = outcome.measures
        drawn.add_row(
            str(outcome.sessions_per_pod),
            outcome.arm,
            f"{one.output_tokens_per_second:.0f}",
            _ratio(one.output_tokens_per_second, baseline.get(outcome.sessions_per_pod)),
            f"{one.hit_rate:.3f}",
            f"{one.ttft_p50:.2f}",
            f"{one.ttft_p90:.1f}",
            f"{one.ttft_p99:.1f}",
            f"{one.holds}",
            f"{one.hold_p99:.1f}",
            f"{one.longest_hold:.1f}",
            f"{one.fairness:.3f}",
            end_section=ordered[index + 1 : index + 2] != []
            and ordered[index + 1].sessions_per_pod != outcome.sessions_per_pod,
        )
    return drawn


def _ratio(value: float, baseline: float | None) -> str:
    return f"{value / baseline:.2f}×" if baseline else "–"


def _numbers(measures: Measures) -> Mapping[str, float | int]:
    return {
        name: round(value, _DIGITS) if isinstance(value, float) else value for name, value in asdict(measures).items()
    }
