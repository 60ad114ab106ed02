"""The Envoy half of the gateway: one complete bootstrap that sends every request through the picker.

``thunderagent envoy-config`` prints it, the demo, the benchmark and the integration tests run it. It is built from
the types of ``envoy-data-plane``, so a misspelt field fails here and not in a proxy. What it protects from: a client
that names its own worker, timeouts that cut a held turn or a long answer, circuit breakers that count held requests
as overload, and idle connections to workers that close under a request.

The filters, in the order in which a request meets them (an answer meets them from the last to the first):

1. ``header_mutation`` takes away the headers that only the picker may set;
2. ``ext_proc`` asks the picker (extproc.md);
3. ``header_to_metadata`` tells the picker, on the way back, which endpoint really served;
4. ``router`` sends the request to the address in ``x-gateway-destination-endpoint``.

The picker is asked on the route only, and nowhere else: what Envoy refuses by itself (no such path to route, CONNECT,
headers too large or malformed) it answers itself, at once. With the filter on everywhere, Envoy would ask the picker
about its own answer and close the connection before the picker has spoken. That remains for a request that turns out
malformed after its headers, such as by a wrong chunk: its connection is closed without an answer.

A request the picker cannot be asked about is answered 503. Envoy cannot let it pass instead (``failure_mode_allow``):
in ``FULL_DUPLEX_STREAMED`` that is honoured for requests without a body only, and nothing would name a worker.

Header names with underscores stay allowed, against the usual advice for an edge: agents send them (Codex does,
``session_id``), and neither the picker nor the workers read an underscore as a dash.
"""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import betterproto2
import yaml
from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap_v3
from envoy_data_plane.envoy.config.cluster import v3 as cluster_v3
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.config.listener import v3 as listener_v3
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.access_loggers.stream import v3 as stream_log
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.header_mutation import v3 as header_mutation
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata import v3 as header_to_metadata
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream_http
from envoy_data_plane.envoy.type import v3 as envoy_type
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Any as PackedMessage
from envoy_data_plane.google.protobuf import Struct, Value

from thunderagent_epp.extproc.handoff import HANDOFF_HEADERS
from thunderagent_epp.extproc.subset import SUBSET_NAMESPACE
from thunderagent_epp.extproc.wire import DESTINATION, DESTINATION_NAMESPACE, SERVED

PICKER_ONLY_HEADERS: Final = (
    DESTINATION,
    SERVED,
    *HANDOFF_HEADERS,
)
"""Request headers taken from every client: each says to proxy or workers where to connect to."""

PICKER_CLUSTER: Final = "thunderagent_picker"
WORKERS_CLUSTER: Final = "workers"

# Workers are uvicorn servers more often than not; those close a connection that was idle for 5 s (vLLM, SGLang), and
# a request sent at that moment is lost. Envoy must be the one to close first.
_WORKER_IDLE_SECONDS: Final = 4

# A held request is an open request. The defaults (1024) would turn the 1025th hold into a 503.
_NO_LIMIT: Final = 2**32 - 1

# How much of one connection Envoy keeps before it stops reading. Bodies may be any size, but up to this much goes to
# the picker as one message, and gRPC servers take messages of 4 MiB unless told otherwise.
_BUFFER_LIMIT_BYTES: Final = 1024 * 1024

_EXT_PROC: Final = "envoy.filters.http.ext_proc"

# For a request to come in. Envoy stops counting at the end of its body, but not for a request without a body or with
# trailers: such a hold must end by the policy, which resumes it after half an hour, and not by this.
_WHOLE_REQUEST_SECONDS: Final = 3600

# What is asked for without a Host header, as HTTP/1.0 allows: no route goes by it, and workers want to see one.
_HTTP_10_HOST: Final = "thunderagent"

_DNS_LABEL: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")

_ACCESS_LOG_FIELDS: Final = {
    "start_time": "%START_TIME%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "protocol": "%PROTOCOL%",
    "status": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "refusal": "%RESP(X-THUNDERAGENT-REFUSAL)%",
    "worker": "%UPSTREAM_HOST%",
    "first_byte_ms": "%RESPONSE_DURATION%",
    "duration_ms": "%DURATION%",
    "request_bytes": "%BYTES_RECEIVED%",
    "response_bytes": "%BYTES_SENT%",
}


@dataclass(frozen=True, slots=True)
class EnvoyOptions:
    """What differs from one gateway to the next. Raises ValueError that names the field at fault.

    * ``listen_address``: an IP address; ``::`` serves IPv4 too. Ports are 0–65535 where Envoy listens (0: a free one).
    * ``picker_address``: an IP address or a DNS name, ``picker_port`` 1–65535.
    * ``tls``: the picker's port speaks TLS. Without ``picker_ca`` its certificate is not verified, since the picker
      makes its own by default; with it, the certificate must be for ``picker_server_name``, by default the address.
    * ``admin_port``: None for no admin listener; it is unauthenticated, so keep ``admin_address`` on loopback.
    * ``worker_connect_timeout_seconds``: > 0, for the connection alone; nothing limits how long an answer takes.
    * ``message_timeout_seconds``: > 0; the picker's time for one message where the filter's modes are changed so that
      the timeout applies. It does not run while a body is in ``FULL_DUPLEX_STREAMED``, so a hold never meets it.
    """

    listen_address: str = "0.0.0.0"
    listen_port: int = 8080
    picker_address: str = "127.0.0.1"
    picker_port: int = 9002
    tls: bool = True
    picker_ca: Path | None = None
    picker_server_name: str | None = None
    admin_address: str = "127.0.0.1"
    admin_port: int | None = None
    access_log: bool = False
    worker_connect_timeout_seconds: float = 2.0
    message_timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        if _ip(self.listen_address) is None:
            raise ValueError(f"listen address must be an IP address, not {self.listen_address!r}")
        if _ip(self.admin_address) is None:
            raise ValueError(f"admin address must be an IP address, not {self.admin_address!r}")
        if not _is_host(self.picker_address):
            raise ValueError(f"picker address must be an IP address or a DNS name, not {self.picker_address!r}")
        for name, port, lowest in (
            ("listen port", self.listen_port, 0),
            ("picker port", self.picker_port, 1),
            ("admin port", self.admin_port, 0),
        ):
            if port is not None and not lowest <= port <= 65535:
                raise ValueError(f"{name} must be {lowest} to 65535, not {port}")
        if self.listen_port and self.listen_port == self.admin_port:
            raise ValueError(f"listen port and admin port must differ, both are {self.listen_port}")
        if not self.tls and self.picker_ca is not None:
            raise ValueError("picker CA is of no use when the picker is spoken to in plaintext")
        if self.picker_server_name is not None and self.picker_ca is None:
            raise ValueError("picker server name is of no use without a picker CA to verify it")
        if self.picker_server_name is not None and not _is_host(self.picker_server_name):
            raise ValueError(f"picker server name must be an IP address or a DNS name, not {self.picker_server_name!r}")
        for name, seconds in (
            ("worker connect timeout", self.worker_connect_timeout_seconds),
            ("message timeout", self.message_timeout_seconds),
        ):
            if not 0 < seconds < float("inf"):
                raise ValueError(f"{name} must be above 0 seconds, not {seconds}")


def bootstrap(options: EnvoyOptions) -> bootstrap_v3.Bootstrap:
    """Build the whole configuration of one Envoy: a listener, the way to the picker and the way to the workers."""
    return bootstrap_v3.Bootstrap(
        node=core.Node(id="thunderagent-gateway", cluster="thunderagent"),
        admin=None
        if options.admin_port is None
        else bootstrap_v3.Admin(address=_address(options.admin_address, options.admin_port)),
        static_resources=bootstrap_v3.BootstrapStaticResources(
            listeners=[_listener(options)], clusters=[_picker_cluster(options), _workers_cluster(options)]
        ),
    )


def render_yaml(configuration: bootstrap_v3.Bootstrap) -> str:
    """Print a configuration as Envoy's own documentation writes it: YAML with snake_case names."""
    return yaml.safe_dump(_plain(configuration), sort_keys=False, width=120, default_flow_style=False)


def render_json(configuration: bootstrap_v3.Bootstrap) -> str:
    """Print a configuration as JSON; ``envoy --config-path`` reads it from a file named ``*.json``."""
    return json.dumps(_plain(configuration), indent=2) + "\n"


def _plain(configuration: bootstrap_v3.Bootstrap) -> dict[str, Any]:
    return configuration.to_dict(casing=betterproto2.Casing.SNAKE)


def _listener(options: EnvoyOptions) -> listener_v3.Listener:
    connection_manager = hcm.HttpConnectionManager(
        stat_prefix="gateway",
        codec_type=hcm.HttpConnectionManagerCodecType.AUTO,
        access_log=[_access_log()] if options.access_log else [],
        # The client's address goes to the workers and client-sent x-envoy-* headers, a timeout among them, do not.
        use_remote_address=True,
        normalize_path=True,
        merge_slashes=True,
        http_protocol_options=core.Http1ProtocolOptions(
            enable_trailers=True, accept_http_10=True, default_host_for_http_10=_HTTP_10_HOST
        ),
        # A held turn and a slow answer are idle streams for as long as the policy allows.
        stream_idle_timeout=timedelta(0),
        # A client that never finishes its headers or its body is neither.
        request_headers_timeout=timedelta(seconds=30),
        request_timeout=timedelta(seconds=_WHOLE_REQUEST_SECONDS),
        http_filters=[
            _filter("envoy.filters.http.header_mutation", _strip_picker_headers()),
            _filter(_EXT_PROC, _ext_proc(options), disabled=True),
            _filter("envoy.filters.http.header_to_metadata", _served_endpoint_to_metadata()),
            _filter("envoy.filters.http.router", router.Router()),
        ],
        route_config=_routes(),
    )
    return listener_v3.Listener(
        name="gateway",
        address=_address(options.listen_address, options.listen_port),
        per_connection_buffer_limit_bytes=_BUFFER_LIMIT_BYTES,
        filter_chains=[
            listener_v3.FilterChain(
                filters=[
                    listener_v3.Filter(
                        name="envoy.filters.network.http_connection_manager",
                        typed_config=PackedMessage.pack(connection_manager),
                    )
                ]
            )
        ],
    )


def _strip_picker_headers() -> header_mutation.HeaderMutation:
    return header_mutation.HeaderMutation(
        mutations=header_mutation.Mutations(
            request_mutations=[mutation_rules.HeaderMutation(remove=name) for name in PICKER_ONLY_HEADERS]
        )
    )


def _ext_proc(options: EnvoyOptions) -> ext_proc.ExternalProcessor:
    send = ext_proc.ProcessingModeHeaderSendMode.SEND
    full_duplex = ext_proc.ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
    return ext_proc.ExternalProcessor(
        grpc_service=core.GrpcService(envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=PICKER_CLUSTER)),
        status_on_error=envoy_type.HttpStatus(code=envoy_type.StatusCode.ServiceUnavailable),
        processing_mode=ext_proc.ProcessingMode(
            request_header_mode=send,
            request_body_mode=full_duplex,
            request_trailer_mode=send,
            response_header_mode=send,
            response_body_mode=full_duplex,
            response_trailer_mode=send,
        ),
        message_timeout=timedelta(seconds=options.message_timeout_seconds),
        metadata_options=ext_proc.MetadataOptions(
            forwarding_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(
                untyped=[SUBSET_NAMESPACE, DESTINATION_NAMESPACE]
            ),
            receiving_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(untyped=[DESTINATION_NAMESPACE]),
        ),
    )


def _served_endpoint_to_metadata() -> header_to_metadata.Config:
    """Move the router's word on who served from a response header, which no client should see, to metadata."""
    return header_to_metadata.Config(
        response_rules=[
            header_to_metadata.ConfigRule(
                header=SERVED,
                on_header_present=header_to_metadata.ConfigKeyValuePair(
                    metadata_namespace=DESTINATION_NAMESPACE,
                    key=SERVED,
                    type=header_to_metadata.ConfigValueType.STRING,
                ),
                remove=True,
            )
        ]
    )


def _routes() -> route.RouteConfiguration:
    return route.RouteConfiguration(
        name="gateway",
        virtual_hosts=[
            route.VirtualHost(
                name="every_host",
                domains=["*"],
                routes=[
                    route.Route(
                        match=route.RouteMatch(prefix="/"),
                        route=route.RouteAction(cluster=WORKERS_CLUSTER, timeout=timedelta(0)),
                        typed_per_filter_config={
                            _EXT_PROC: PackedMessage.pack(
                                ext_proc.ExtProcPerRoute(overrides=ext_proc.ExtProcOverrides())
                            )
                        },
                        # The router writes this before any filter sees the answer; the served filter takes it out.
                        response_headers_to_add=[
                            core.HeaderValueOption(
                                header=core.HeaderValue(key=SERVED, value="%UPSTREAM_REMOTE_ADDRESS%"),
                                append_action=core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
                            )
                        ],
                    )
                ],
            )
        ],
    )


def _picker_cluster(options: EnvoyOptions) -> cluster_v3.Cluster:
    has_name = _ip(options.picker_address) is None
    picker = endpoint.Endpoint(address=_address(options.picker_address, options.picker_port))
    return cluster_v3.Cluster(
        name=PICKER_CLUSTER,
        type=cluster_v3.ClusterDiscoveryType.STRICT_DNS if has_name else cluster_v3.ClusterDiscoveryType.STATIC,
        # "localhost" has both families and a picker often only one; IPv4 is the one that is there.
        dns_lookup_family=cluster_v3.ClusterDnsLookupFamily.V4_PREFERRED,
        lb_policy=cluster_v3.ClusterLbPolicy.ROUND_ROBIN,
        load_assignment=endpoint.ClusterLoadAssignment(
            cluster_name=PICKER_CLUSTER,
            endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=[endpoint.LbEndpoint(endpoint=picker)])],
        ),
        connect_timeout=timedelta(seconds=2),
        transport_socket=_tls_to_picker(options) if options.tls else None,
        typed_extension_protocol_options=_http_options(
            upstream_http.HttpProtocolOptions(
                explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(
                    http2_protocol_options=core.Http2ProtocolOptions()
                )
            )
        ),
        **_open_ended(),
    )


def _workers_cluster(options: EnvoyOptions) -> cluster_v3.Cluster:
    return cluster_v3.Cluster(
        name=WORKERS_CLUSTER,
        type=cluster_v3.ClusterDiscoveryType.ORIGINAL_DST,
        lb_policy=cluster_v3.ClusterLbPolicy.CLUSTER_PROVIDED,
        original_dst_lb_config=cluster_v3.ClusterOriginalDstLbConfig(
            use_http_header=True, http_header_name=DESTINATION
        ),
        connect_timeout=timedelta(seconds=options.worker_connect_timeout_seconds),
        typed_extension_protocol_options=_http_options(
            upstream_http.HttpProtocolOptions(
                common_http_protocol_options=core.HttpProtocolOptions(
                    idle_timeout=timedelta(seconds=_WORKER_IDLE_SECONDS)
                ),
                explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(
                    http_protocol_options=core.Http1ProtocolOptions(enable_trailers=True)
                ),
            )
        ),
        **_open_ended(),
    )


def _open_ended() -> dict[str, Any]:
    """What a cluster needs whose requests may be many, long and silent: no breakers, and dead peers found by TCP."""
    return {
        "per_connection_buffer_limit_bytes": _BUFFER_LIMIT_BYTES,
        "circuit_breakers": cluster_v3.CircuitBreakers(
            thresholds=[
                cluster_v3.CircuitBreakersThresholds(
                    max_connections=_NO_LIMIT, max_pending_requests=_NO_LIMIT, max_requests=_NO_LIMIT
                )
            ]
        ),
        # Not HTTP/2 pings: gRPC servers close a connection that pings more often than every five minutes.
        "upstream_connection_options": cluster_v3.UpstreamConnectionOptions(
            tcp_keepalive=core.TcpKeepalive(keepalive_probes=3, keepalive_time=30, keepalive_interval=10)
        ),
    }


def _tls_to_picker(options: EnvoyOptions) -> core.TransportSocket:
    name = options.picker_server_name or _bare(options.picker_address)
    is_dns_name = _ip(name) is None
    verification = None
    if options.picker_ca is not None:
        kind = tls.SubjectAltNameMatcherSanType.DNS if is_dns_name else tls.SubjectAltNameMatcherSanType.IP_ADDRESS
        verification = tls.CertificateValidationContext(
            trusted_ca=core.DataSource(filename=str(options.picker_ca)),
            match_typed_subject_alt_names=[
                tls.SubjectAltNameMatcher(san_type=kind, matcher=matcher.StringMatcher(exact=name))
            ],
        )
    context = tls.UpstreamTlsContext(
        sni=name if is_dns_name else "",
        common_tls_context=tls.CommonTlsContext(alpn_protocols=["h2"], validation_context=verification),
    )
    return core.TransportSocket(name="envoy.transport_sockets.tls", typed_config=PackedMessage.pack(context))


def _access_log() -> accesslog.AccessLog:
    fields = Struct(fields={name: Value(string_value=value) for name, value in _ACCESS_LOG_FIELDS.items()})
    log = stream_log.StdoutAccessLog(log_format=core.SubstitutionFormatString(json_format=fields))
    return accesslog.AccessLog(name="envoy.access_loggers.stdout", typed_config=PackedMessage.pack(log))


def _filter(name: str, configuration: betterproto2.Message, *, disabled: bool = False) -> hcm.HttpFilter:
    return hcm.HttpFilter(name=name, typed_config=PackedMessage.pack(configuration), disabled=disabled)


def _http_options(options: upstream_http.HttpProtocolOptions) -> dict[str, PackedMessage]:
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": PackedMessage.pack(options)}


def _address(host: str, port: int) -> core.Address:
    bare = _bare(host)
    return core.Address(
        socket_address=core.SocketAddress(address=bare, port_value=port, ipv4_compat=bare == "::"),
    )


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(_bare(host))
    except ValueError:
        return None


def _is_host(host: str) -> bool:
    if _ip(host) is not None:
        return True
    labels = host.removesuffix(".").split(".")
    # An all-numeric last label is a mistyped IPv4 address, never a name.
    return len(host) <= 253 and all(map(_DNS_LABEL.fullmatch, labels)) and not labels[-1].isdigit()
