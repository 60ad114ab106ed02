"""The command line. The only module that knows picker, operator and simulator; each is imported where its command
needs it, so that one can be installed without the others and ``--help`` stays quick."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from thunderagent_epp import __version__
from thunderagent_epp.options import configure_logs, feed_tls, refuse, warn, write_out
from thunderagent_epp.picker_options import (
    DrainDelay,
    DrainTimeout,
    GrpcPort,
    HealthPort,
    Host,
    HttpPort,
    LogFormat,
    LogLevel,
    MaxBodyBytes,
    MaxHeldBytes,
    Plaintext,
    TlsCertificate,
    TlsKey,
    run_picker,
)
from thunderagent_operator.commands import crd, operator, standalone
from thunderagent_sim.commands import simulate_worker
from thunderagent_sim.demo_command import demo
from thunderagent_sim.fleet.command import simulate

app = typer.Typer(
    name="thunderagent",
    help="Program-aware endpoint picker for inference gateways: keeps coding agents' KV caches warm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
                write_out(f"{decision}\n", flush=False)
    except TraceError as error:
        write_out("")
        refuse(f"{name}: {error}")
    except OSError as error:
        refuse(f"{name}: {error.strerror or error}")
    write_out("")


@app.command()
def epp(
    policy_file: Annotated[
        Path | None,
        typer.Option(help="Policy and workers from a file, re-read when it changes.", metavar="FILE"),
    ] = None,
    feed: Annotated[str | None, typer.Option(help="Policy and workers from an operator.", metavar="HOST:PORT")] = None,
    policy: Annotated[
        str | None, typer.Option(help="The ThunderAgentPolicy to follow, with --feed.", metavar="NAMESPACE/NAME")
    ] = None,
    feed_ca: Annotated[
        Path | None, typer.Option(help="CA of the operator's certificate; without it, plaintext.", metavar="FILE")
    ] = None,
    feed_cert: Annotated[Path | None, typer.Option(help="Certificate to show the operator.", metavar="FILE")] = None,
    feed_key: Annotated[Path | None, typer.Option(help="Its private key.", metavar="FILE")] = None,
    conformance: Annotated[
        bool,
        typer.Option("--conformance", help="Be the fixture picker of the Gateway API Inference Extension's tests."),
    ] = False,
    conformance_endpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="A pod of the pool, or a headless Service of them, with --conformance; give it again for more.",
            metavar="HOST:PORT",
        ),
    ] = None,
    host: Host = "",
    grpc_port: GrpcPort = 9002,
    health_port: HealthPort = 9003,
    http_port: HttpPort = 9090,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    plaintext: Plaintext = False,
    max_body_bytes: MaxBodyBytes = 64 << 20,
    max_held_bytes: MaxHeldBytes = 1 << 30,
    drain_delay: DrainDelay = 5.0,
    drain_timeout: DrainTimeout = 600.0,
    log_level: LogLevel = "info",
    log_format: LogFormat = "auto",
) -> None:
    """Run the endpoint picker: an Envoy external-processing server."""
    configure_logs(log_level, log_format)
    from thunderagent_epp.process import Conformance, OperatorFeedOptions, PolicyFile

    source: PolicyFile | OperatorFeedOptions | Conformance
    if conformance:
        if any(option is not None for option in (policy_file, feed, policy, feed_ca, feed_cert, feed_key)):
            refuse("--conformance: goes with no policy; leave out --policy-file, --feed and what belongs to them")
        pool = tuple(_host_port("--conformance-endpoint", text) for text in conformance_endpoint or ())
        if any(not 1 <= port <= 65535 for _, port in pool):
            refuse("--conformance-endpoint: port must be 1 to 65535")
        source = Conformance(pool)
    elif conformance_endpoint:
        refuse("--conformance-endpoint: goes with --conformance only")
    elif policy_file is not None:
        if any(option is not None for option in (feed, policy, feed_ca, feed_cert, feed_key)):
            refuse("--policy-file: goes with none of --feed, --policy, --feed-ca, --feed-cert and --feed-key")
        source = PolicyFile(policy_file)
    elif feed is not None and policy is not None:
        source = OperatorFeedOptions(feed, policy, feed_tls(feed_ca, feed_cert, feed_key))
    else:
        refuse("give --policy-file FILE, or --feed HOST:PORT with --policy NAMESPACE/NAME")
    run_picker(
        source,
        host=host,
        grpc_port=grpc_port,
        health_port=health_port,
        http_port=http_port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        plaintext=plaintext,
        max_body_bytes=max_body_bytes,
        max_held_bytes=max_held_bytes,
        drain_delay=drain_delay,
        drain_timeout=drain_timeout,
    )


@app.command("envoy-config")
def envoy_config(
    picker: Annotated[str, typer.Option(help="Where the picker listens.", metavar="HOST:PORT")] = "127.0.0.1:9002",
    listen: Annotated[str, typer.Option(help="Where clients come in.", metavar="ADDRESS:PORT")] = "0.0.0.0:8080",
    plaintext: Annotated[bool, typer.Option("--plaintext", help="The picker has no TLS.")] = False,
    picker_ca: Annotated[
        Path | None, typer.Option(help="Verify the picker's certificate by this CA.", metavar="FILE")
    ] = None,
    picker_server_name: Annotated[
        str | None, typer.Option(help="Name in the picker's certificate, if not its host.", metavar="NAME")
    ] = None,
    admin: Annotated[
        str | None, typer.Option(help="Where Envoy's admin page listens; none by default.", metavar="ADDRESS:PORT")
    ] = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log each request to standard output.")] = False,
    connect_timeout: Annotated[float, typer.Option(help="Seconds to connect to a worker.")] = 2.0,
    message_timeout: Annotated[float, typer.Option(help="Seconds for a message; no limit for a hold.")] = 10.0,
    output: Annotated[str, typer.Option("--output", "-o", help="yaml or json.")] = "yaml",
) -> None:
    """Print a complete Envoy bootstrap for the picker."""
    from thunderagent_epp.envoy_config import EnvoyOptions, bootstrap, render_json, render_yaml

    renderers = {"yaml": render_yaml, "json": render_json}
    if output not in renderers:
        refuse(f"--output: must be yaml or json, not {output!r}")
    picker_address, picker_port = _host_port("--picker", picker)
    listen_address, listen_port = _host_port("--listen", listen)
    admin_address, admin_port = ("127.0.0.1", None) if admin is None else _host_port("--admin", admin)
    try:
        options = EnvoyOptions(
            listen_address=listen_address,
            listen_port=listen_port,
            picker_address=picker_address,
            picker_port=picker_port,
            tls=not plaintext,
            picker_ca=picker_ca,
            picker_server_name=picker_server_name,
            admin_address=admin_address,
            admin_port=admin_port,
            access_log=access_log,
            worker_connect_timeout_seconds=connect_timeout,
            message_timeout_seconds=message_timeout,
        )
    except ValueError as error:
        refuse(str(error))
    if picker_ca is not None and not picker_ca.is_file():
        warn(f"--picker-ca: there is no file {picker_ca} here; Envoy needs it where it runs")
    write_out(renderers[output](bootstrap(options)))


def _host_port(option: str, text: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal():
        refuse(f"{option}: must be HOST:PORT, such as 127.0.0.1:9002 or [::1]:9002, not {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


app.command()(standalone)
app.command()(operator)
app.command()(crd)
app.command("simulate-worker")(simulate_worker)
app.command()(demo)
app.command()(simulate)


def main() -> None:
    """Entry point of ``thunderagent``."""
    app()


if __name__ == "__main__":
    main()
