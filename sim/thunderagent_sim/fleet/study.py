"""The study in docs/study.md: ``python -m thunderagent_sim.fleet.study docs/study`` runs it and draws its pictures.

Every arm under every load with three seeds, then the fleets that are not as they should be. Runs on as many processes
as there are cores; writes ``results.md``, its tables, and the plots of the first seed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from os import cpu_count
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from PIL import Image

from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_sim.fleet.command import run_one
from thunderagent_sim.fleet.measures import Measures, percentile
from thunderagent_sim.fleet.plots import draw_all
from thunderagent_sim.fleet.policy_arm import POLICIES, NamedArm
from thunderagent_sim.fleet.report import BASELINE, Outcome
from thunderagent_sim.fleet.run import Loss, Scenario
from thunderagent_sim.fleet.workload import CodingAgents

SEEDS: Final = (1, 2, 3)
LOADS: Final = (4, 8, 16, 24, 32, 48, 84)
NAMED_LOADS: Final = (32, 48, 84)
SIZES: Final = (0, 20_000, 40_000, 60_000, 80_000, 100_000, 200_001)


def _rotation(name: str, ledger_share: float = 1.0, **parameters: float) -> NamedArm:
    return NamedArm(name, AdmissionPolicy.from_parameters({"policy": "Rotation"} | parameters), ledger_share)


ARMS: Final = (
    NamedArm("load"),
    NamedArm("affinity"),
    NamedArm(BASELINE),
    NamedArm("classic", POLICIES["classic"]),
    _rotation("rotation"),
)
NAMED: Final = (
    _rotation("latency", hold_budget=0.4),
    _rotation("throughput", hold_budget=0.14),
    _rotation("ledger 10% short", ledger_share=0.9),
    _rotation("threshold 1, budget .33", hold_budget=0.33, pause_threshold=1.0),
)
FLEETS: Final[Mapping[str, Scenario]] = {
    "16 pods": Scenario(32, pods=16),
    "bursts every 20 s": Scenario(32, burst_seconds=20.0),
    "one pod half as fast": Scenario(32, slowness={0: 2.0}),
    "a worker lost for 2 minutes": Scenario(32, losses=(Loss(0, 1500.0, 120.0),)),
}


class _Job(NamedTuple):
    group: str
    scenario: Scenario
    arm: NamedArm


def _play(job: _Job) -> tuple[str, Outcome, int]:
    outcome = run_one(job.scenario, job.arm, CodingAgents())
    return job.group, outcome, job.scenario.seed


def _jobs() -> Iterable[_Job]:
    for name, scenario in FLEETS.items():
        yield from (_Job(name, scenario, arm) for arm in ARMS[2:])
    for load in reversed(LOADS):
        arms = (*ARMS, *NAMED) if load in NAMED_LOADS else ARMS
        yield from (_Job("", Scenario(load, seed=seed), arm) for seed in SEEDS for arm in arms)


def study(directory: Path) -> None:
    """Run everything and write it to ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(cpu_count()) as pool:
        played = list(pool.map(_play, _jobs()))
    text = ["# Results of the study", "", "Written by `python -m thunderagent_sim.fleet.study`; read"]
    text[-1] += " [the study](../study.md) first. Medians of three seeds, ranges in brackets; times in seconds."
    text += _loads([(outcome, seed) for group, outcome, seed in played if not group])
    text += _fleets([(group, outcome) for group, outcome, _ in played if group])
    (directory / "results.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    names = {arm.name for arm in ARMS} | {"latency", "throughput"}
    first = [outcome for group, outcome, seed in played if not group and seed == 1 and outcome.arm in names]
    for path in draw_all(directory, first, Scenario(32)):
        # A few colours are enough, and a picture of a third of the size for the repository.
        Image.open(path).convert("RGB").quantize(48, dither=Image.Dither.NONE).save(path, optimize=True)


def _loads(played: Sequence[tuple[Outcome, int]]) -> list[str]:
    text: list[str] = []
    baseline = {(one.sessions_per_pod, seed): one.measures for one, seed in played if one.arm == BASELINE}
    for load in LOADS:
        text += ["", f"## {load} sessions per pod", "", *_head("arm")]
        runs = [(one, seed) for one, seed in played if one.sessions_per_pod == load]
        for arm in dict.fromkeys(one.arm for one, _ in runs):
            mine = [(one.measures, baseline[load, seed]) for one, seed in runs if one.arm == arm]
            text.append(_row(arm, mine))
    text += [
        "",
        "## Hold by size of the prompt",
        "",
        "Median / longest at 48 sessions per pod, all seeds together.",
        "",
    ]
    steps = list(pairwise(SIZES))
    text += ["| arm | " + " | ".join(f"{low // 1000}–{high // 1000} k" for low, high in steps) + " |"]
    text += ["|---|" + "---:|" * len(steps)]
    for arm in ("classic", "rotation", "latency", "throughput"):
        held = [hold for one, _ in played if one.arm == arm and one.sessions_per_pod == 48 for hold in one.holds]
        cells = []
        for low, high in steps:
            seconds = sorted(hold.seconds for hold in held if low <= hold.prompt_tokens < high)
            cells.append(f"{percentile(seconds, 50):.0f} / {percentile(seconds, 100):.0f}")
        text.append(f"| {arm} | " + " | ".join(cells) + " |")
    return text


def _fleets(played: Sequence[tuple[str, Outcome]]) -> list[str]:
    text: list[str] = []
    for name in FLEETS:
        text += ["", f"## {name[0].upper()}{name[1:]}, 32 sessions per pod, seed 1", "", *_head("arm")]
        runs = [one for group, one in played if group == name]
        (baseline,) = (one.measures for one in runs if one.arm == BASELINE)
        text += [_row(one.arm, [(one.measures, baseline)]) for one in runs]
    return text


def _head(first: str) -> list[str]:
    names = (first, "tokens/s", "ratio", "hit", "p50", "p90", "p99", "p99 ratio", "longest hold", "Jain")
    return ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]


def _row(arm: str, runs: Sequence[tuple[Measures, Measures]]) -> str:
    def cell(value: Callable[[Measures, Measures], float], digits: int) -> str:
        values = sorted(value(one, base) for one, base in runs)
        middle = f"{median(values):.{digits}f}"
        low, high = f"{values[0]:.{digits}f}", f"{values[-1]:.{digits}f}"
        return middle if low == high else f"{middle} ({low}–{high})"

    cells = (
        cell(lambda one, _: one.output_tokens_per_second, 0),
        cell(lambda one, base: one.output_tokens_per_second / base.output_tokens_per_second, 2),
        cell(lambda one, _: one.hit_rate, 3),
        cell(lambda one, _: one.ttft_p50, 2),
        cell(lambda one, _: one.ttft_p90, 1),
        cell(lambda one, _: one.ttft_p99, 1),
        cell(lambda one, base: one.ttft_p99 / base.ttft_p99, 2),
        cell(lambda one, _: one.longest_hold, 0),
        cell(lambda one, _: one.fairness, 3),
    )
    return f"| {arm} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    study(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/study"))
