"""The options of every command that runs a picker, and how such a command starts and fails.

`cli.py` has ``epp``, the operator's `commands.py` has ``standalone``: they differ in where snapshots come from and in
nothing else. What runs is imported when it runs, so that ``--help`` stays quick.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from thunderagent_epp.options import fail, refuse

if TYPE_CHECKING:
    from thunderagent_epp.process import Conformance, OperatorFeedOptions, PolicyFile

_PORT_MAX: Final = 65535

Host: TypeAlias = Annotated[str, typer.Option(help="Address to listen on; every interface by default.")]
GrpcPort: TypeAlias = Annotated[int, typer.Option(min=0, max=_PORT_MAX, help="The picker's port; 0 takes a free one.")]
HealthPort: TypeAlias = Annotated[int, typer.Option(min=0, max=_PORT_MAX, help="Health alone, in plaintext.")]
HttpPort: TypeAlias = Annotated[int, typer.Option(min=0, max=_PORT_MAX, help="/metrics, /state, /healthz and /readyz.")]
TlsCertificate: TypeAlias = Annotated[
    Path | None, typer.Option(help="Certificate of the picker's port, reloaded when it changes.", metavar="FILE")
]
TlsKey: TypeAlias = Annotated[Path | None, typer.Option(help="Its private key.", metavar="FILE")]
Plaintext: TypeAlias = Annotated[bool, typer.Option("--plaintext", help="No TLS on the picker's port.")]
MaxBodyBytes: TypeAlias = Annotated[int, typer.Option(min=1, help="Larger request bodies are refused.")]
MaxHeldBytes: TypeAlias = Annotated[int, typer.Option(min=1, help="Most bytes of bodies held at once.")]
DrainDelay: TypeAlias = Annotated[float, typer.Option(min=0, help="Seconds from SIGTERM until requests are refused.")]
DrainTimeout: TypeAlias = Annotated[float, typer.Option(min=0, help="Seconds that running answers are then given.")]
LogLevel: TypeAlias = Annotated[
    str, typer.Option(help="debug, info, warning or error, and parts with their own: info,scheduling=debug.")
]
LogFormat: TypeAlias = Annotated[str, typer.Option(help="json, console, or auto: console on a terminal.")]


def run_picker(
    source: PolicyFile | OperatorFeedOptions | Conformance,
    *,
    host: str,
    grpc_port: int,
    health_port: int,
    http_port: int,
    tls_cert: Path | None,
    tls_key: Path | None,
    plaintext: bool,
    max_body_bytes: int,
    max_held_bytes: int,
    drain_delay: float,
    drain_timeout: float,
) -> None:
    """Run a picker until it is told to stop, or end the command because it cannot be run as asked."""
    from thunderagent_epp.extproc.tls import CertificateError
    from thunderagent_epp.feed.policy_file import PolicyFileError
    from thunderagent_epp.process import PickerOptions, serve

    if plaintext and (tls_cert is not None or tls_key is not None):
        refuse("--plaintext: takes no --tls-cert and no --tls-key")
    for option, seconds in (("--drain-delay", drain_delay), ("--drain-timeout", drain_timeout)):
        if not math.isfinite(seconds):
            refuse(f"{option}: must be a number of seconds, not {seconds}")
    options = PickerOptions(
        source=source,
        host=host,
        grpc_port=grpc_port,
        health_port=health_port,
        http_port=http_port,
        tls_certificate=tls_cert,
        tls_key=tls_key,
        plaintext=plaintext,
        max_body_bytes=max_body_bytes,
        max_held_bytes=max_held_bytes,
        drain_delay_seconds=drain_delay,
        drain_timeout_seconds=drain_timeout,
    )
    try:
        asyncio.run(serve(options))
    except (PolicyFileError, CertificateError, ValueError) as error:
        refuse(*str(error).splitlines())
    except OSError as error:
        fail(error)
