"""Envoys configured otherwise than by this project: changes to the bootstrap that `running_envoy` writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeAlias

import betterproto2
import pytest
from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap_v3
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata import v3 as header_to_metadata
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.google.protobuf import Any as PackedMessage

from thunderagent_epp.envoy_config import EnvoyOptions, bootstrap
from thunderagent_epp.extproc.subset import SUBSET_KEY, SUBSET_NAMESPACE

Change: TypeAlias = Callable[[hcm.HttpConnectionManager], None]

EXT_PROC = "envoy.filters.http.ext_proc"
HEADER_MUTATION = "envoy.filters.http.header_mutation"


def change_envoys(monkeypatch: pytest.MonkeyPatch, *changes: Change) -> None:
    """Make every Envoy that the test starts from now on one with these changes."""

    def changed(options: EnvoyOptions) -> bootstrap_v3.Bootstrap:
        configuration = bootstrap(options)
        assert configuration.static_resources is not None
        (network_filter,) = configuration.static_resources.listeners[0].filter_chains[0].filters
        assert network_filter.typed_config is not None
        manager = network_filter.typed_config.unpack()
        assert isinstance(manager, hcm.HttpConnectionManager)
        for change in changes:
            change(manager)
        network_filter.typed_config = PackedMessage.pack(manager)
        return configuration

    monkeypatch.setattr("thunderagent_sim.envoy_process.bootstrap", changed)


def filter_ahead(name: str, configuration: betterproto2.Message) -> Change:
    """Let a request meet another filter before all others."""

    def change(manager: hcm.HttpConnectionManager) -> None:
        manager.http_filters.insert(0, hcm.HttpFilter(name=name, typed_config=PackedMessage.pack(configuration)))

    return change


def without_filter(name: str) -> Change:
    def change(manager: hcm.HttpConnectionManager) -> None:
        manager.http_filters = [each for each in manager.http_filters if each.name != name]

    return change


def processing_mode(change_mode: Callable[[ext_proc.ProcessingMode], None]) -> Change:
    """Have the picker's filter send something else."""

    def change(manager: hcm.HttpConnectionManager) -> None:
        (own,) = (each for each in manager.http_filters if each.name == EXT_PROC)
        assert own.typed_config is not None
        configuration = own.typed_config.unpack()
        assert isinstance(configuration, ext_proc.ExternalProcessor)
        assert configuration.processing_mode is not None
        change_mode(configuration.processing_mode)
        own.typed_config = PackedMessage.pack(configuration)

    return change


def subset_from_header(header: str) -> Change:
    """Take the subset hint from a request header: a protobuf ``Value`` in base64, so of any kind."""
    rule = header_to_metadata.ConfigRule(
        header=header,
        on_header_present=header_to_metadata.ConfigKeyValuePair(
            metadata_namespace=SUBSET_NAMESPACE,
            key=SUBSET_KEY,
            type=header_to_metadata.ConfigValueType.PROTOBUF_VALUE,
            encode=header_to_metadata.ConfigValueEncode.BASE64,
        ),
        remove=True,
    )
    return filter_ahead("envoy.filters.http.header_to_metadata", header_to_metadata.Config(request_rules=[rule]))


def route_timeout(seconds: float) -> Change:
    """Have the router answer 504 when a worker takes longer; it does not run before a request reaches the router."""

    def change(manager: hcm.HttpConnectionManager) -> None:
        for action in _actions(manager):
            action.timeout = timedelta(seconds=seconds)

    return change


def request_timeout(seconds: float) -> Change:
    """Have Envoy end a request that has not come in whole for longer."""

    def change(manager: hcm.HttpConnectionManager) -> None:
        manager.request_timeout = timedelta(seconds=seconds)

    return change


def stream_duration(seconds: float) -> Change:
    """Have Envoy itself end what takes longer, wherever it is."""

    def change(manager: hcm.HttpConnectionManager) -> None:
        for action in _actions(manager):
            action.max_stream_duration = route.RouteActionMaxStreamDuration(
                max_stream_duration=timedelta(seconds=seconds)
            )

    return change


def stream_idle_timeout(seconds: float) -> Change:
    """Have Envoy itself end what sends nothing for longer."""

    def change(manager: hcm.HttpConnectionManager) -> None:
        manager.stream_idle_timeout = timedelta(seconds=seconds)

    return change


def only_with_destination(manager: hcm.HttpConnectionManager) -> None:
    """Route by the destination header, and show the metadata beside it: without either, an answer of Envoy's own."""
    assert manager.route_config is not None
    (own,) = manager.route_config.virtual_hosts[0].routes
    assert own.match is not None
    own.match.headers = [route.HeaderMatcher(name="x-gateway-destination-endpoint", present_match=True)]
    own.response_headers_to_add.append(
        core.HeaderValueOption(
            header=core.HeaderValue(
                key="x-metadata", value="%DYNAMIC_METADATA(envoy.lb:x-gateway-destination-endpoint)%"
            )
        )
    )
    elsewhere = route.Route(
        match=route.RouteMatch(prefix="/"),
        direct_response=route.DirectResponseAction(status=404),
        typed_per_filter_config=own.typed_per_filter_config,  # a request is on it until the picker has answered
    )
    manager.route_config.virtual_hosts[0].routes.append(elsewhere)


def _actions(manager: hcm.HttpConnectionManager) -> Iterator[route.RouteAction]:
    assert manager.route_config is not None
    for host in manager.route_config.virtual_hosts:
        for each in host.routes:
            assert each.route is not None
            yield each.route
