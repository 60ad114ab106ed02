"""``thunderagent simulate``: its options, what it refuses, and what it prints. `thunderagent_epp.cli` adds it.

What runs is imported when it is called, so that ``thunderagent --help`` stays quick.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from thunderagent_epp.options import fail, refuse

if TYPE_CHECKING:
    from thunderagent_sim.fleet.policy_arm import NamedArm
    from thunderagent_sim.fleet.report import Outcome
    from thunderagent_sim.fleet.run import Scenario
    from thunderagent_sim.fleet.service import Service
    from thunderagent_sim.fleet.workload import Workload

WARMUP_MINUTES: Final = 10.0
_PIPE_WIDTH: Final = 100
BUILT_IN_ENGINE: Final = "fitted"


def simulate(
    pods: Annotated[int, typer.Option(min=1, help="Simulated workers.")] = 4,
    sessions_per_pod: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N[,N...]", help="Agent sessions at a time, per pod; one run for each.", show_default="8,16,32,48"
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Simulated time, the first 10 minutes of which are not counted.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the sessions: the same seed, the same result.")] = 1,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARM",
            help="load, affinity or prefix (plain routers), classic or rotation (policies as they come), or a policy "
            "file. Give it once for each arm.",
            show_default="prefix and rotation",
        ),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="coding-agents, coding-agents-serial (no overlapping turns), or a JSON-lines file of recorded "
            "sessions.",
        ),
    ] = "coding-agents",
    engine: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="fitted, or a YAML file of the service constants.")
    ] = BUILT_IN_ENGINE,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write results.json, results.csv and plots there.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")] = False,
    announce_ends: Annotated[
        bool, typer.Option("--announce-ends", help="Sessions say which turn is their last; few harnesses do.")
    ] = False,
    ledger_share: Annotated[
        float,
        typer.Option(min=0.1, max=2, help="Share of each context that policies are told of: 0.9 is a tenth short."),
    ] = 1.0,
) -> None:
    """Ask what a policy would do to a fleet: agent sessions on simulated workers, in simulated time.

    Runs the very admission rules and selector of the picker against a model of vLLM's scheduler and prefix cache.
    The same options give the same result on every machine.
    """
    from thunderagent_sim.fleet.run import Scenario

    if not WARMUP_MINUTES < minutes < float("inf"):
        refuse(f"--minutes: must be above {WARMUP_MINUTES:g}, the minutes of warm-up, not {minutes:g}")
    loads = _loads(sessions_per_pod or ["8,16,32,48"])
    sessions = _workload(workload)
    service = _service(engine)
    arms = _arms(arm or ["prefix", "rotation"], ledger_share, announce_ends)
    if sessions.largest_context_tokens > service.capacity_tokens:
        refuse(
            f"--workload: {workload}: a context can have {sessions.largest_context_tokens:,} tokens, and a pod's cache "
            f"holds {service.capacity_tokens:,}"
        )
    for one in arms:
        if one.policy is not None and one.policy.max_tracked_requests < 2 * pods * max(loads):
            refuse(
                f"--arm: {one.name}: maxTrackedRequests {one.policy.max_tracked_requests} is too few for "
                f"{pods * max(loads)} sessions, each with two turns at a time"
            )
    if out is not None:
        _prepare(out)
    scenarios = [
        Scenario(load, pods=pods, minutes=minutes, warmup_minutes=WARMUP_MINUTES, seed=seed, service=service)
        for load in loads
    ]
    outcomes = _run(scenarios, arms, sessions)
    _show(outcomes, scenarios[0], workload, out, json)


def _loads(given: Sequence[str]) -> list[int]:
    texts = [text.strip() for one in given for text in one.split(",")]
    for text in texts:
        if not text.isdecimal() or not 1 <= int(text) <= 10_000:
            refuse(f"--sessions-per-pod: must be whole numbers from 1 to 10000 with commas between, not {text!r}")
    return sorted({int(text) for text in texts})


def _workload(given: str) -> Workload:
    from thunderagent_sim.fleet.recorded import WorkloadError, load_workload
    from thunderagent_sim.fleet.workload import BUILT_IN

    if given in BUILT_IN:
        return BUILT_IN[given]
    if not Path(given).exists():
        refuse(f"--workload: {given} is neither a file nor one of {', '.join(BUILT_IN)}")
    try:
        return load_workload(Path(given))
    except WorkloadError as error:
        refuse(str(error))


def _service(given: str) -> Service:
    from thunderagent_sim.fleet.service import FITTED, ServiceError, load_service

    if given == BUILT_IN_ENGINE:
        return FITTED
    if not Path(given).exists():
        refuse(f"--engine: {given} is neither a file nor {BUILT_IN_ENGINE}")
    try:
        return load_service(Path(given))
    except ServiceError as error:
        refuse(*str(error).splitlines())


def _arms(given: Sequence[str], ledger_share: float, announce_ends: bool) -> list[NamedArm]:
    from thunderagent_sim.fleet.policy_arm import ArmError, NamedArm, policy_of

    arms: dict[str, NamedArm] = {}
    for text in dict.fromkeys(given):
        try:
            policy = policy_of(text)
        except ArmError as error:
            refuse(*str(error).splitlines())
        name = Path(text).stem
        if name in arms:
            name = text
        arms[name] = NamedArm(name, policy, ledger_share, announce_ends)
    return list(arms.values())


def _prepare(out: Path) -> None:
    """Find out before the run, not after it, whether the results can be written."""
    if find_spec("matplotlib") is None:
        refuse("--out: plots need matplotlib: pip install 'thunderagent-epp[study]'")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--out: {out}: {error.strerror or error}")


def _run(scenarios: Sequence[Scenario], arms: Sequence[NamedArm], workload: Workload) -> list[Outcome]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    outcomes = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        # A fleet of more sessions takes longer; how much longer, nearly in proportion.
        total = len(arms) * sum(scenario.minutes * 60 * scenario.sessions_per_pod for scenario in scenarios)
        task = progress.add_task("", total=total)
        done = 0.0
        for scenario in scenarios:
            for one in arms:
                progress.update(task, description=f"{one.name} at {scenario.sessions_per_pod} sessions per pod")

                def on_time(now: float, done: float = done, weight: int = scenario.sessions_per_pod) -> None:
                    progress.update(task, completed=done + now * weight)

                outcomes.append(run_one(scenario, one, workload, on_time))
                done += scenario.minutes * 60 * scenario.sessions_per_pod
    return outcomes


def run_one(
    scenario: Scenario, arm: NamedArm, workload: Workload, on_time: Callable[[float], None] | None = None
) -> Outcome:
    """Run one arm and keep what tables and plots need; ``on_time`` is told how far it is."""
    from thunderagent_sim.fleet.arms import Observed
    from thunderagent_sim.fleet.measures import holds, measure, times_to_first_token
    from thunderagent_sim.fleet.report import Outcome
    from thunderagent_sim.fleet.run import Fleet

    decisions: list[Observed] = []
    run = Fleet(scenario, workload, arm.make(decisions.append), on_time).run()
    return Outcome(
        arm=arm.name,
        sessions_per_pod=scenario.sessions_per_pod,
        measures=measure(run),
        first_token_seconds=list(times_to_first_token(run)),
        holds=list(holds(run)),
        samples=run.samples,
        decisions=decisions,
    )


def _show(outcomes: Sequence[Outcome], scenario: Scenario, workload: str, out: Path | None, json: bool) -> None:
    from json import dumps

    from rich.console import Console

    from thunderagent_sim.fleet.report import as_json, table, write_results

    if json:
        typer.echo(dumps(as_json(outcomes)))
    else:
        # A file or a pipe has no width of its own.
        console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        console.print(table(outcomes, scenario, workload))
    if out is None:
        return
    from thunderagent_sim.fleet.plots import draw_all

    try:
        write_results(out, outcomes, scenario, workload)
        plots = draw_all(out, outcomes, scenario)
    except OSError as error:
        fail(error)
    typer.echo(f"{out}: results.json, results.csv, {', '.join(path.name for path in plots)}", err=True)
