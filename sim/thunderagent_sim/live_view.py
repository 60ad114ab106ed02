"""What a person sees of the demo: a live screen on a terminal, plain lines elsewhere, and the table at the end.

Both views draw the `Moment` that `demo.py` gives them and ask nobody else.
"""

from __future__ import annotations

import io
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from thunderagent_sim.agents import Agent, AgentState
from thunderagent_sim.demo import BASELINE, PHASES, PROGRAM_AWARE, Moment, Phase, PhaseResult
from thunderagent_sim.observation import ProgramObservation, WorkerObservation

_WORKER_BAR_WIDTH: Final = 18
_SESSION_BAR_WIDTH: Final = 12
_SESSION_BAR_TOKENS: Final = 12_000
_PLAIN_LINE_EVERY_SECONDS: Final = 5.0
_SCREENSHOT_WIDTH: Final = 92

_EXPLAINED: Final = {
    PROGRAM_AWARE: "sessions are admitted, paused and resumed as a whole",
    BASELINE: "admission Disabled: each request goes to the worker with the least to do",
}
_STYLES: Final = {
    "held": "yellow",
    "paused": "magenta",
    "prefill": "red",
    "answering": "green",
    "tool": "cyan",
    "starting": "dim",
}


def activity(agent: Agent, program: ProgramObservation | None) -> str:
    """Say what a session is doing: what its agent sees, and whether the picker holds its turn or has paused it."""
    paused = program is not None and program.paused
    match agent.state:
        case AgentState.WAITING:
            return "held" if paused else "prefill"
        case AgentState.TOOL:
            return "paused" if paused else "tool"
        case state:
            return str(state)


class LiveScreen:
    """Redraws one screen in place; a context, as the terminal has to be put right at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self.middle: RenderableType | None = None
        """The screen half-way through the program-aware phase, for the screenshot."""
        self._load_seconds = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._live.stop()

    def starting(self, phase: Phase) -> None:
        """Say that a gateway is being started."""
        self._draw(Text.assemble(_title(phase), "  starting Envoy, the picker and its workers ..."))

    def ready(self, phase: Phase, start_seconds: float, load_seconds: float) -> None:
        """Remember how long the phase will be."""
        self._load_seconds = load_seconds

    def show(self, moment: Moment) -> None:
        """Draw workers and sessions as they are."""
        drawn = screen(moment)
        if moment.phase is PROGRAM_AWARE and moment.seconds_left > self._load_seconds / 2:
            self.middle = drawn
        self._draw(drawn)

    def finished(self, phase: Phase, result: PhaseResult) -> None:
        """Leave the screen to the next phase."""

    def _draw(self, drawn: RenderableType) -> None:
        self._live.update(drawn, refresh=True)


class PlainLines:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_at_seconds_left = 0.0

    def starting(self, phase: Phase) -> None:
        """Say that a gateway is being started."""
        self._say(f"{phase.title}: starting Envoy, the picker and its workers")

    def ready(self, phase: Phase, start_seconds: float, load_seconds: float) -> None:
        """Say how long that took and how long the agents will work."""
        self._say(
            f"{phase.title}: first request answered after {start_seconds:.1f} s; agents work for {load_seconds:.0f} s"
        )
        self._next_at_seconds_left = load_seconds - _PLAIN_LINE_EVERY_SECONDS

    def show(self, moment: Moment) -> None:
        """Say how far it has come, now and then."""
        if moment.seconds_left <= self._next_at_seconds_left:
            self._next_at_seconds_left -= _PLAIN_LINE_EVERY_SECONDS
            self._say(f"{moment.phase.title}: {moment.seconds_left:.0f} s left, {_totals(moment)}")

    def finished(self, phase: Phase, result: PhaseResult) -> None:
        """Say what came of the phase."""
        self._say(f"{phase.title}: {result.turns} turns, cache hit rate {_share(result.hit_rate)}")

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def screen(moment: Moment) -> RenderableType:
    """One phase at one moment."""
    heading = Text.assemble(
        _title(moment.phase),
        (f"  {moment.seconds_left:.0f} s left", "bold"),
        (f"\n{_EXPLAINED[moment.phase]}", "dim"),
    )
    footer = [Text(_totals(moment), style="bold")]
    footer += [Text(f"{phase.title}: {_in_short(result)}", style="dim") for phase, result in moment.earlier.items()]
    return Group(heading, "", _workers(moment), _demand(moment), "", _sessions(moment), "", *footer)


def result_table(results: Mapping[Phase, PhaseResult], seed: int) -> RenderableType:
    """What came of the phases, side by side."""
    phases = [phase for phase in PHASES if phase in results]
    columns = [results[phase] for phase in phases]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("")
    for phase in phases:
        table.add_column(phase.title, justify="right")
    table.add_row("turns", *(f"{result.turns}" for result in columns))
    if any(result.failed for result in columns):
        table.add_row("failed", *(f"{result.failed}" for result in columns), style="red")
    table.add_row("holds", *(f"{result.holds}" for result in columns))
    table.add_row("pauses", *(f"{result.pauses}" for result in columns))
    table.add_row("resumes", *(f"{result.resumes}" for result in columns))
    table.add_row("cache hit rate", *(_share(result.hit_rate) for result in columns), style="bold")
    table.add_row("turn time p50", *(_time(result.turn_seconds_p50) for result in columns), style="bold")
    table.add_row("turn time p99", *(_time(result.turn_seconds_p99) for result in columns))
    table.add_row("unfinished", *(f"{result.unfinished} ({result.held_at_end} held)" for result in columns))
    return Group(
        table,
        "",
        Text(
            f"The same sessions (seed {seed}), {_for_how_long(columns)}, from empty caches; baseline is"
            " admission Disabled. Turn times include holds, and unfinished turns with the time they had taken. Holds"
            " make some turns wait longer so that the others find their context cached.",
            style="dim",
        ),
        *(
            Text(f"{phase.title}: a turn failed: {result.first_failure}", style="red")
            for phase, result in results.items()
            if result.first_failure is not None
        ),
    )


def _for_how_long(results: Sequence[PhaseResult]) -> str:
    seconds = [f"{result.load_seconds:.0f} s" for result in results]
    return f"{seconds[0]} each" if len(set(seconds)) == 1 else " and ".join(seconds)


def save_screenshot(file: Path, *drawn: RenderableType) -> None:
    """Write what was drawn as one SVG. Raises OSError."""
    console = Console(record=True, width=_SCREENSHOT_WIDTH, file=io.StringIO(), force_terminal=True)
    for each in drawn:
        console.print(each)
        console.print()
    file.write_text(console.export_svg(title="thunderagent demo"))


def _title(phase: Phase) -> Text:
    return Text(f"{phase.title} ({PHASES.index(phase) + 1} of {len(PHASES)})", style="bold reverse")


def _workers(moment: Moment) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "left", "right", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    counted = "charged" if moment.phase is PROGRAM_AWARE else "in use"
    for worker in moment.observation.workers:
        tokens = worker.charged_tokens if moment.phase is PROGRAM_AWARE else worker.busy_tokens
        table.add_row(
            worker.name,
            _bar(tokens, worker.capacity_tokens, _WORKER_BAR_WIDTH),
            f"{tokens:,}/{worker.capacity_tokens:,} {counted}",
            f"{worker.requests} running",
            f"hits {_share(_hits(worker))}",
        )
    return table


def _hits(worker: WorkerObservation) -> float | None:
    return worker.hit_tokens / worker.queried_tokens if worker.queried_tokens else None


def _sessions(moment: Moment) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("session")
    table.add_column("turn", justify="right")
    table.add_column("context")
    table.add_column("", justify="right")
    table.add_column("worker")
    table.add_column("state")
    table.add_column("for", justify="right")
    for agent in moment.agents:
        program = moment.observation.programs.get(agent.session)
        doing = activity(agent, program)
        table.add_row(
            agent.session or f"agent-{agent.number:02}",
            f"{agent.turn}/{agent.turns}" if agent.turns else "",
            _bar(agent.context_tokens, _SESSION_BAR_TOKENS, _SESSION_BAR_WIDTH),
            f"{agent.context_tokens:,}",
            (program.worker if program else None) or "-",
            Text(doing, style=_STYLES[doing]),
            f"{moment.now - agent.since:.1f} s",
        )
    return table


def _bar(value: int, total: int, width: int) -> ProgressBar:
    style = "red" if value > total else "green" if value < 0.8 * total else "yellow"
    return ProgressBar(
        total=max(total, 1), completed=min(value, total), width=width, complete_style=style, finished_style=style
    )


def _totals(moment: Moment) -> str:
    seen = moment.observation
    failed = f", {moment.failed} failed" if moment.failed else ""
    return (
        f"{moment.turns} turns{failed}, {seen.holds} holds ({seen.held} now), {seen.pauses} pauses,"
        f" {seen.resumes} resumes, cache hit rate {_share(moment.hit_rate)}"
    )


def _demand(moment: Moment) -> Text:
    contexts = sum(agent.context_tokens for agent in moment.agents)
    capacity = sum(worker.capacity_tokens for worker in moment.observation.workers)
    return Text.assemble(
        "all sessions' contexts together: ",
        (f"{contexts:,} tokens", "red" if contexts > capacity else "green"),
        f", the caches hold {capacity:,}",
    )


def _in_short(result: PhaseResult) -> str:
    return (
        f"{result.turns} turns, hit rate {_share(result.hit_rate)},"
        f" turn time p50 {_time(result.turn_seconds_p50)}, p99 {_time(result.turn_seconds_p99)}"
    )


def _share(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.0f} %"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
