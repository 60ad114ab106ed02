"""The command line. The only module that knows picker, operator and simulator; each is imported where its command
needs it, so that one can be installed without the others and ``--help`` stays quick."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from thunderagent_epp import __version__

app = typer.Typer(
    name="thunderagent",
    help="Program-aware endpoint picker for inference gateways: keeps coding agents' KV caches warm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

BAD_INPUT = 2
"""Exit status of everything that is wrong with what the user gave."""


def _refuse(message: str) -> NoReturn:
    typer.echo(f"thunderagent: {message}", err=True)
    raise typer.Exit(BAD_INPUT)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thunderagent {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(metavar="FILE", help="A JSON-lines trace, - for standard input.")],
) -> None:
    """Run a recorded trace through the admission policy and print its decisions, one JSON object a line."""
    from thunderagent_epp.replay import TraceError
    from thunderagent_epp.replay import replay as decisions

    name = "standard input" if str(trace) == "-" else str(trace)
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if str(trace) == "-" else trace.open("rb") as lines:
            for decision in decisions(lines):
                print(decision)  # noqa: T201
    except TraceError as error:
        sys.stdout.flush()
        _refuse(f"{name}: {error}")
    except OSError as error:
        _refuse(f"{name}: {error.strerror or error}")


def main() -> None:
    """Entry point of ``thunderagent``."""
    app()


if __name__ == "__main__":
    main()
