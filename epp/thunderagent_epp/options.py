"""What the commands of picker, operator and simulator have in common: how they refuse, log and take TLS files."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import typer

if TYPE_CHECKING:
    from thunderagent_epp.feed.tls import TlsFiles

FAILED: Final = 1
"""Exit status of what should have worked: a port that is taken, a part that broke."""

READER_LEFT: Final = 128 + signal.SIGPIPE
"""Exit status of a command whose output nobody reads any more, as the shell has it."""

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


def warn(remark: str) -> None:
    """Say what may be wrong, and go on."""
    typer.echo(f"thunderagent: warning: {remark}", err=True)


def write_out(text: str, *, flush: bool = True) -> None:
    """Write to standard output, or end the command: without a word where its reader has left, as ``head`` does."""
    try:
        sys.stdout.write(text)
        if flush:
            sys.stdout.flush()
    except OSError as error:
        # Python flushes what is left once more when it ends, and would complain in its own way.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(READER_LEFT) from None
        fail(f"standard output: {error.strerror or error}")


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
