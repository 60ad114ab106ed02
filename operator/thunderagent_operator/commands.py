"""``thunderagent operator``, ``crd`` and ``standalone``: their options, and how they fail.

`thunderagent_epp.cli` adds them. What runs is imported when the command runs, so that the picker can be installed
without kopf and the rest.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from thunderagent_epp.options import configure_logs, fail, feed_tls, refuse
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


def operator(
    namespace: Annotated[
        list[str] | None, typer.Option(help="Serve this namespace only; may be given again.", metavar="NAMESPACE")
    ] = None,
    feed_host: Annotated[str, typer.Option(help="Address of the feed; every interface by default.")] = "",
    feed_port: Annotated[int, typer.Option(min=0, max=65535, help="Where pickers connect; 0 takes a free one.")] = 9004,
    http_host: Annotated[str, typer.Option(help="Address of the pages; every interface by default.")] = "",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="/metrics, /healthz and /readyz.")] = 9091,
    feed_ca: Annotated[
        Path | None, typer.Option(help="Serve only pickers that this CA vouches for.", metavar="FILE")
    ] = None,
    feed_cert: Annotated[
        Path | None, typer.Option(help="Certificate of the feed; without it, plaintext.", metavar="FILE")
    ] = None,
    feed_key: Annotated[Path | None, typer.Option(help="Its private key.", metavar="FILE")] = None,
    lease_namespace: Annotated[
        str | None, typer.Option(help="Namespace of the Lease; the pod's own by default.", metavar="NAMESPACE")
    ] = None,
    lease_name: Annotated[str, typer.Option(help="Name of the Lease.")] = "thunderagent-operator",
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error, and parts with their own: info,operator=debug.")
    ] = "info",
    log_format: Annotated[str, typer.Option(help="json, console, or auto: console on a terminal.")] = "auto",
) -> None:
    """Run the operator: watches policies and workers, and feeds the endpoint pickers."""
    configure_logs(log_level, log_format)
    try:
        from thunderagent_operator.process import OperatorError, OperatorOptions, operate
    except ModuleNotFoundError as error:
        refuse(f"{error.name} is not installed: pip install 'thunderagent-epp[operator]'")
    from thunderagent_epp.feed.tls import FeedTlsError

    options = OperatorOptions(
        namespaces=tuple(dict.fromkeys(namespace or ())),
        feed_host=feed_host,
        feed_port=feed_port,
        http_host=http_host,
        http_port=http_port,
        tls=feed_tls(feed_ca, feed_cert, feed_key),
        lease_namespace=lease_namespace,
        lease_name=lease_name,
    )
    try:
        asyncio.run(operate(options))
    except FeedTlsError as error:
        refuse(str(error))
    except (OperatorError, OSError) as error:
        fail(error)


def standalone(
    policy_file: Annotated[
        Path, typer.Option(help="Policy and workers from a file, re-read when it changes.", metavar="FILE")
    ],
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
    """Run the endpoint picker without Kubernetes, asking the policy file's workers what they can hold."""
    configure_logs(log_level, log_format)
    from thunderagent_epp.process import PolicyFile
    from thunderagent_operator.standalone import ProbedFileFeed

    run_picker(
        PolicyFile(policy_file, ProbedFileFeed),
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


def crd() -> None:
    """Print the CustomResourceDefinition of ThunderAgentPolicy: thunderagent crd | kubectl apply -f -"""
    from thunderagent_operator.crd import crd_yaml

    typer.echo(crd_yaml(), nl=False)
