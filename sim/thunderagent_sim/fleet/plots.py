"""The pictures of a study. The only module of the fleet that needs matplotlib, the extra ``study``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from thunderagent_epp.scheduling.decisions import Pause, Resume
from thunderagent_sim.fleet.measures import percentile
from thunderagent_sim.fleet.report import BASELINE, Outcome
from thunderagent_sim.fleet.run import Scenario

_COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a51a3", "#7f7f7f")
"""Told apart by the colour-blind too (Okabe and Ito)."""

_STYLE: Final = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 120,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}
_SIZE_STEP_TOKENS: Final = 20_000
_TIMELINE_NEAR_SESSIONS: Final = 32


def draw_all(directory: Path, outcomes: Sequence[Outcome], scenario: Scenario) -> list[Path]:
    """Draw every picture there is something for, as PNG files in ``directory``."""
    with style.context(_STYLE):
        figures = {
            "throughput": _throughput(outcomes),
            "front": _front(outcomes),
            "first_token": _first_token(outcomes),
            "holds": _holds(outcomes),
            "timeline": _timeline(outcomes, scenario),
        }
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            path = directory / f"{name}.png"
            figure.savefig(path, metadata={"Software": None})
            paths.append(path)
    return paths


def _arms(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Each arm's colour."""
    names = dict.fromkeys(outcome.arm for outcome in outcomes)
    return {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(names)}


def _of(arm: str, outcomes: Sequence[Outcome]) -> list[Outcome]:
    return sorted((one for one in outcomes if one.arm == arm), key=lambda one: one.sessions_per_pod)


def _highest(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The runs under the highest load."""
    load = max(outcome.sessions_per_pod for outcome in outcomes)
    return [outcome for outcome in outcomes if outcome.sessions_per_pod == load]


def _figure(rows: int = 1, height: float = 4.2, *, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(7.5, height * rows if rows == 2 else height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, sharey=share_y, squeeze=False)
    return figure, [row[0] for row in axes]


def _throughput(outcomes: Sequence[Outcome]) -> Figure:
    """Throughput and hit rate against sessions per pod, one line per arm."""
    figure, (throughput, hits) = _figure(2, 3.2)
    for arm, color in _arms(outcomes).items():
        runs = _of(arm, outcomes)
        loads = [run.sessions_per_pod for run in runs]
        throughput.plot(
            loads, [run.measures.output_tokens_per_second for run in runs], color=color, marker="o", label=arm
        )
        hits.plot(loads, [run.measures.hit_rate for run in runs], color=color, marker="o")
    throughput.set_ylabel("output tokens/s of the pool")
    throughput.set_ylim(bottom=0)
    throughput.legend()
    hits.set_ylabel("share of prompt tokens cached")
    hits.set_ylim(0, 1)
    hits.set_xlabel("sessions per pod")
    return figure


def _front(outcomes: Sequence[Outcome]) -> Figure | None:
    """Throughput ratio against the ratio of p99 time to first token, both to the baseline at the same load."""
    baseline = {run.sessions_per_pod: run.measures for run in _of(BASELINE, outcomes)}
    arms = [arm for arm in _arms(outcomes) if arm != BASELINE]
    if not baseline or not arms:
        return None
    figure, (axes,) = _figure()
    colors = _arms(outcomes)
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.axvline(1, color="0.6", linewidth=0.8)
    for arm in arms:
        runs = [run for run in _of(arm, outcomes) if run.sessions_per_pod in baseline]
        across = [_over(run.measures.ttft_p99, baseline[run.sessions_per_pod].ttft_p99) for run in runs]
        up = [
            _over(run.measures.output_tokens_per_second, baseline[run.sessions_per_pod].output_tokens_per_second)
            for run in runs
        ]
        axes.plot(across, up, color=colors[arm], marker="o", linewidth=0.8, label=arm)
        for run, x, y in zip(runs, across, up, strict=True):
            axes.annotate(str(run.sessions_per_pod), (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:g}×")
    axes.set_xlabel(f"p99 time to first token, against {BASELINE} (numbers: sessions per pod)")
    axes.set_ylabel(f"output tokens/s, against {BASELINE}")
    axes.legend()
    return figure


def _over(value: float, baseline: float) -> float:
    return value / baseline if baseline else 1.0


def _first_token(outcomes: Sequence[Outcome]) -> Figure:
    """Share of turns that waited longer than a time for their first token, under the highest load."""
    figure, (axes,) = _figure()
    colors = _arms(outcomes)
    runs = _highest(outcomes)
    for run in runs:
        waits = sorted(run.first_token_seconds)
        longer = [(len(waits) - index) / len(waits) for index in range(len(waits))]
        axes.step([max(wait, 0.01) for wait in waits], longer, color=colors[run.arm], where="post", label=run.arm)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(
        f"time to first token in s, at {runs[0].sessions_per_pod} sessions per pod;\n"
        "turns still waiting at the end counted at their age"
    )
    axes.set_ylabel("share of turns that waited longer")
    axes.legend()
    return figure


def _holds(outcomes: Sequence[Outcome]) -> Figure | None:
    """Median and longest hold by size of the prompt, under the highest load."""
    runs = [run for run in _highest(outcomes) if run.holds]
    if not runs:
        return None
    figure, (axes,) = _figure()
    colors = _arms(outcomes)
    for run in runs:
        ordered = sorted(run.holds, key=lambda hold: hold.prompt_tokens)
        middles, medians, longest = [], [], []
        for step, group in groupby(ordered, key=lambda hold: hold.prompt_tokens // _SIZE_STEP_TOKENS):
            seconds = sorted(hold.seconds for hold in group)
            middles.append((step + 0.5) * _SIZE_STEP_TOKENS / 1000)
            medians.append(percentile(seconds, 50))
            longest.append(seconds[-1])
        axes.plot(middles, medians, color=colors[run.arm], marker="o", label=f"{run.arm}, median")
        axes.plot(middles, longest, color=colors[run.arm], marker="^", linestyle=":", label=f"{run.arm}, longest")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"prompt, thousand tokens, at {runs[0].sessions_per_pod} sessions per pod")
    axes.set_ylabel("held, s")
    axes.legend()
    return figure


def _timeline(outcomes: Sequence[Outcome], scenario: Scenario) -> Figure | None:
    """Used over capacity of each worker with its pauses and resumes, of one program-aware run."""
    runs = [run for run in outcomes if any(any(sample.charged) for sample in run.samples)]
    if not runs:
        return None
    run = min(runs, key=lambda one: abs(one.sessions_per_pod - _TIMELINE_NEAR_SESSIONS))
    capacity = scenario.service.capacity_tokens
    figure, rows = _figure(scenario.pods, 1.5 * scenario.pods + 1, share_y=True)
    moved = [one for one in run.decisions if isinstance(one.decision, Pause | Resume)]
    times = [sample.time / 60 for sample in run.samples]
    for pod, axes in enumerate(rows):
        axes.plot(times, [sample.charged[pod] / capacity for sample in run.samples], color=_COLORS[0], linewidth=0.9)
        axes.plot(times, [sample.held[pod] / capacity for sample in run.samples], color="0.6", linewidth=0.7)
        axes.axvspan(0, scenario.warmup_minutes, color="0.93", zorder=0)
        axes.set_ylabel(f"pod {pod}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        for kind, color, at in ((Pause, _COLORS[1], 1.06), (Resume, _COLORS[2], 1.12)):
            moments = [one.time / 60 for one in moved if isinstance(one.decision, kind) and one.pod == pod]
            axes.plot(moments, [at] * len(moments), "|", color=color, markersize=5)
        axes.set_ylim(0, 1.18)
    rows[0].set_title(
        f"{run.arm} at {run.sessions_per_pod} sessions per pod: charged (blue) and held by running turns (grey), of "
        "capacity;\npauses (orange) and resumes (green) above; warm-up shaded",
        fontsize=9,
    )
    rows[-1].set_xlabel("minutes")
    return figure
