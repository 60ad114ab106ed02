"""What the commands of picker, operator and simulator have in common: how they refuse, log and take TLS files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import typer

if TYPE_CHECKING:
    from thunderagent_epp.feed.tls import TlsFiles

FAILED: Final = 1
"""Exit status of what should have worked: a port that is taken, a part that broke."""

BAD_INPUT: Final = 2
"""Exit status of everything that is wrong with what the user gave."""


def refuse(*problems: str) -> NoReturn:
    """End the command because of what the user gave, one line for each problem."""
    for problem in problems:
        typer.echo(f"thunderagent: {problem}", err=True)
    raise typer.Exit(BAD_INPUT)


def fail(problem: object) -> NoReturn:
    """End the command because something did not work."""
    typer.echo(f"thunderagent: {problem}", err=True)
    raise typer.Exit(FAILED)


def configure_logs(level: str, format_name: str) -> None:
    """Set logging up as asked, or refuse. Call it before gRPC is imported."""
    # gRPC's core writes lines of its own among ours, one for each handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from thunderagent_epp.telemetry import logs

    log_format = next((known for known in logs.FORMATS if known == format_name), None)
    if log_format is None:
        refuse(f"--log-format: must be one of {', '.join(logs.FORMATS)}, not {format_name!r}")
    try:
        logs.configure(level, log_format)
    except ValueError as error:
        refuse(f"--log-level: {error}")


def feed_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """The TLS files of one end of the feed; None for plaintext."""
    from thunderagent_epp.feed.tls import FeedTlsError, TlsFiles

    if ca is None and certificate is None and key is None:
        return None
    try:
        return TlsFiles(ca, certificate, key)
    except FeedTlsError as error:
        refuse(str(error))
