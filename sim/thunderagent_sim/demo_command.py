"""``thunderagent demo``: its options, its exit status, and its end on a signal. `thunderagent_epp.cli` adds it.

What runs is imported when it is called, so that ``thunderagent --help`` stays quick.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from thunderagent_sim.demo import Phase, PhaseResult
    from thunderagent_sim.gateway import Gateway

PART_FAILED: Final = 1
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

T = TypeVar("T")


def demo(
    seconds: Annotated[
        float | None,
        typer.Option(help="Time for everything, start-up included; at least 10.", show_default="55; none with --serve"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sessions: the same seed, the same load.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="No load: leave the program-aware gateway running for your own requests.")
    ] = False,
    disaggregated: Annotated[
        bool, typer.Option("--disaggregated", help="Two prefill and two decode workers in place of two that do both.")
    ] = False,
    screenshot: Annotated[Path | None, typer.Option(hidden=True, help="Draw an SVG of the run.")] = None,
) -> None:
    """Show agent sessions running through a real Envoy, held and placed by the picker over simulated workers.

    Runs a dozen agents against two small workers, program-aware first and then with admission Disabled, and compares.
    Everything runs on free ports of this machine and ends with the command.
    """
    from rich.console import Console

    from thunderagent_sim.demo import DEFAULT_SECONDS, LEAST_SECONDS
    from thunderagent_sim.processes import PartError

    if serve and (json or screenshot is not None):
        raise typer.BadParameter("--serve runs no load to report on; leave --json and --screenshot out")
    if seconds is not None and not LEAST_SECONDS <= seconds < float("inf"):
        raise typer.BadParameter(f"--seconds must be at least {LEAST_SECONDS:g}, not {seconds:g}")
    try:
        if serve:
            _run(_serve(seconds, disaggregated), ends_with_signal=True)
        else:
            # With --json the live view goes where the progress goes: stderr.
            console = Console(stderr=json)
            _compare(DEFAULT_SECONDS if seconds is None else seconds, seed, json, screenshot, console, disaggregated)
    except PartError as error:
        typer.echo(f"thunderagent demo: {error}", err=True)
        for line in error.log:
            typer.echo(f"  before that: {line}", err=True)
        raise typer.Exit(PART_FAILED) from None


def _compare(
    seconds: float, seed: int, json: bool, screenshot: Path | None, console: Console, disaggregated: bool
) -> None:
    from functools import partial
    from json import dumps

    from thunderagent_sim.demo import run_demo
    from thunderagent_sim.live_view import LiveScreen, PlainLines, result_table, save_screenshot

    middle = None
    so_far: dict[Phase, PhaseResult] = {}
    on_time = partial(run_demo, seconds, seed, clock=time.monotonic, disaggregated=disaggregated, so_far=so_far)
    try:
        if console.is_interactive or screenshot is not None:
            with LiveScreen(console) as live:
                results = _run(on_time(view=live))
            middle = live.middle
        else:
            results = _run(on_time(view=PlainLines(console)))
    except typer.Exit:
        if so_far:
            console.print(result_table(so_far, seed))
        console.print("interrupted: this is what was measured until then" if so_far else "interrupted")
        raise
    table = result_table(results, seed)
    if json:
        typer.echo(dumps({phase.key: result.as_json() for phase, result in results.items()}))
    else:
        console.print(table)
    if screenshot is not None and middle is not None:
        save_screenshot(screenshot, middle, table)
    if any(result.failed for result in results.values()):
        raise typer.Exit(PART_FAILED)


async def _serve(seconds: float | None, disaggregated: bool) -> None:
    from thunderagent_sim.demo import PROGRAM_AWARE
    from thunderagent_sim.gateway import running_gateway

    typer.echo("starting Envoy, the picker and its workers ...", err=True)
    async with running_gateway(PROGRAM_AWARE.admission, disaggregated=disaggregated) as gateway:
        typer.echo(_welcome(gateway))
        try:
            async with asyncio.timeout(seconds):
                await gateway.watch()
        except TimeoutError:
            return


def _welcome(gateway: Gateway) -> str:
    from thunderagent_sim.agents import SESSION_HEADER
    from thunderagent_sim.gateway import MODEL

    body = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"hello"}}]}}'
    return (
        f"The gateway is at {gateway.url}; Ctrl-C ends it. Send it turns of a session:\n\n"
        f"  curl -w '\\n' {gateway.url}/v1/chat/completions -H 'content-type: application/json'"
        f" -H '{SESSION_HEADER}: mine' -d '{body}'\n\n"
        f"  state    {gateway.picker_url}/state\n"
        f"  metrics  {gateway.picker_url}/metrics\n"
        f"  policy   {gateway.policy_file} (edit it: the picker follows)\n"
    )


def _run(work: Coroutine[Any, Any, T], *, ends_with_signal: bool = False) -> T:
    """Run to the end, or to a signal: everything is taken down, then the shell's 128 + signal is the exit status.

    Where a signal is the way to end it (``ends_with_signal``), that is no failure and the status is 0.
    """
    came: list[signal.Signals] = []

    async def until_signal() -> T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            # A second Ctrl-C must not stop the taking down, which takes no time.
            if not came:
                task.cancel()
            came.append(number)

        for number in _SIGNALS:
            loop.add_signal_handler(number, stop, number)
        return await work

    try:
        return asyncio.run(until_signal())
    except asyncio.CancelledError:
        raise typer.Exit(0 if ends_with_signal else 128 + came[0]) from None
