"""Every bootstrap is shown to a real Envoy; what a gateway must and must not contain is read back from the YAML."""

from __future__ import annotations

import datetime
import ipaddress
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from thunderagent_epp.envoy_config import EnvoyOptions, bootstrap, render_json, render_yaml
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_sim.envoy_process import envoy_binary


def accepted(text: str, file: Path) -> str:
    """What Envoy says against a configuration; empty when it is accepted."""
    file.write_text(text)
    run = subprocess.run(
        [envoy_binary(), "--mode", "validate", "--config-path", file, "--log-level", "error"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return "" if run.returncode == 0 else run.stderr


def as_read(options: EnvoyOptions) -> dict[str, Any]:
    configuration: dict[str, Any] = yaml.safe_load(render_yaml(bootstrap(options)))
    return configuration


def connection_manager(options: EnvoyOptions) -> dict[str, Any]:
    (listener,) = as_read(options)["static_resources"]["listeners"]
    manager: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


def http_filter(options: EnvoyOptions, name: str) -> dict[str, Any]:
    (found,) = [each for each in connection_manager(options)["http_filters"] if each["name"] == name]
    configuration: dict[str, Any] = found["typed_config"]
    return configuration


def cluster(options: EnvoyOptions, name: str) -> dict[str, Any]:
    (found,) = [each for each in as_read(options)["static_resources"]["clusters"] if each["name"] == name]
    configuration: dict[str, Any] = found
    return configuration


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=36500))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "ca.pem"
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return file


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(EnvoyOptions(), id="defaults"),
        pytest.param(EnvoyOptions(tls=False), id="plaintext"),
        pytest.param(EnvoyOptions(listen_address="::", picker_address="::1"), id="ipv6"),
        pytest.param(EnvoyOptions(picker_address="[fd00::7]", picker_port=19002), id="bracketed-ipv6"),
        pytest.param(EnvoyOptions(picker_address="thunderagent-epp.llm.svc.cluster.local."), id="dns"),
        pytest.param(EnvoyOptions(listen_port=0, admin_port=0, access_log=True), id="free-ports-and-access-log"),
    ],
)
def test_envoy_accepts_what_the_options_make(options: EnvoyOptions, tmp_path: Path) -> None:
    assert accepted(render_yaml(bootstrap(options)), tmp_path / "envoy.yaml") == ""


def test_envoy_accepts_the_json_form(tmp_path: Path) -> None:
    assert accepted(render_json(bootstrap(EnvoyOptions(admin_port=9901))), tmp_path / "envoy.json") == ""


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "picker.llm.svc"])
def test_envoy_accepts_a_picker_that_is_verified(address: str, authority: Path, tmp_path: Path) -> None:
    options = EnvoyOptions(picker_address=address, picker_ca=authority)
    assert accepted(render_yaml(bootstrap(options)), tmp_path / "envoy.yaml") == ""


def test_envoy_would_tell_of_a_mistake(tmp_path: Path) -> None:
    text = render_yaml(bootstrap(EnvoyOptions())).replace("FULL_DUPLEX_STREAMED", "FULL_DUPLEX")
    assert "FULL_DUPLEX" in accepted(text, tmp_path / "envoy.yaml")


def test_the_yaml_and_the_json_say_the_same() -> None:
    configuration = bootstrap(EnvoyOptions(admin_port=9901, access_log=True))
    assert yaml.safe_load(render_json(configuration)) == yaml.safe_load(render_yaml(configuration))


def test_the_clients_own_destination_is_stripped_before_the_picker_is_asked() -> None:
    assert [each["name"] for each in connection_manager(EnvoyOptions())["http_filters"]] == [
        "envoy.filters.http.header_mutation",
        "envoy.filters.http.ext_proc",
        "envoy.filters.http.header_to_metadata",
        "envoy.filters.http.router",
    ]
    stripped = http_filter(EnvoyOptions(), "envoy.filters.http.header_mutation")["mutations"]["request_mutations"]
    assert {"remove": "x-gateway-destination-endpoint"} in stripped
    assert {"remove": "x-prefiller-host-port"} in stripped


def test_the_picker_sees_every_phase_both_ways() -> None:
    assert http_filter(EnvoyOptions(), "envoy.filters.http.ext_proc")["processing_mode"] == {
        "request_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    }


def test_subset_hints_go_to_the_picker_and_its_choice_comes_back() -> None:
    assert http_filter(EnvoyOptions(), "envoy.filters.http.ext_proc")["metadata_options"] == {
        "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
        "receiving_namespaces": {"untyped": ["envoy.lb"]},
    }


def test_no_timeout_cuts_a_hold_or_a_long_answer() -> None:
    manager = connection_manager(EnvoyOptions())
    assert manager["stream_idle_timeout"] == "0s"
    (only,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert only["route"] == {"cluster": "workers", "timeout": "0s"}


def test_a_request_that_never_comes_in_whole_is_ended_long_after_any_hold() -> None:
    manager = connection_manager(EnvoyOptions())
    assert manager["request_headers_timeout"] == "30s"
    assert manager["request_timeout"] == "3600s"
    assert AdmissionPolicy().resume_timeout_seconds == 1800


def test_the_picker_is_asked_on_the_route_and_not_about_the_proxys_own_answers() -> None:
    manager = connection_manager(EnvoyOptions())
    disabled = [each["name"] for each in manager["http_filters"] if each.get("disabled")]
    assert disabled == ["envoy.filters.http.ext_proc"]
    (only,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert only["typed_per_filter_config"] == {
        "envoy.filters.http.ext_proc": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": {},
        }
    }


def test_requests_go_where_the_destination_header_says() -> None:
    workers = cluster(EnvoyOptions(), "workers")
    assert workers["type"] == "ORIGINAL_DST"
    assert workers["lb_policy"] == "CLUSTER_PROVIDED"
    assert workers["original_dst_lb_config"] == {
        "use_http_header": True,
        "http_header_name": "x-gateway-destination-endpoint",
    }


@pytest.mark.parametrize("name", ["thunderagent_picker", "workers"])
def test_five_thousand_holds_meet_no_circuit_breaker(name: str) -> None:
    (threshold,) = cluster(EnvoyOptions(), name)["circuit_breakers"]["thresholds"]
    assert min(threshold.values()) == 4294967295


@pytest.mark.parametrize(
    ("address", "discovery"),
    [("10.1.2.3", "STATIC"), ("fd00::7", "STATIC"), ("[fd00::7]", "STATIC"), ("picker.llm.svc", "STRICT_DNS")],
)
def test_a_picker_is_looked_up_only_when_it_has_a_name(address: str, discovery: str) -> None:
    # Envoy's default, which is not printed, is STATIC.
    assert cluster(EnvoyOptions(picker_address=address), "thunderagent_picker").get("type", "STATIC") == discovery


def test_the_picker_is_spoken_to_in_http2_over_tls() -> None:
    picker = cluster(EnvoyOptions(picker_address="picker.llm.svc"), "thunderagent_picker")
    options = picker["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]
    assert options["explicit_http_config"] == {"http2_protocol_options": {}}
    context = picker["transport_socket"]["typed_config"]
    assert context["sni"] == "picker.llm.svc"
    assert context["common_tls_context"] == {"alpn_protocols": ["h2"]}


def test_a_plaintext_picker_has_no_tls() -> None:
    assert "transport_socket" not in cluster(EnvoyOptions(tls=False), "thunderagent_picker")


def test_a_verified_picker_must_own_the_name_it_is_called_by(authority: Path) -> None:
    options = EnvoyOptions(picker_address="10.1.2.3", picker_ca=authority, picker_server_name="picker.llm.svc")
    context = cluster(options, "thunderagent_picker")["transport_socket"]["typed_config"]
    assert context["sni"] == "picker.llm.svc"
    assert context["common_tls_context"]["validation_context"] == {
        "trusted_ca": {"filename": str(authority)},
        "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": "picker.llm.svc"}}],
    }


def test_a_request_the_picker_cannot_be_asked_about_is_unavailable() -> None:
    asked = http_filter(EnvoyOptions(), "envoy.filters.http.ext_proc")
    assert asked["status_on_error"] == {"code": "ServiceUnavailable"}
    assert "failure_mode_allow" not in asked


def test_the_admin_listener_is_off_unless_asked_for_and_then_on_loopback() -> None:
    assert "admin" not in as_read(EnvoyOptions())
    assert as_read(EnvoyOptions(admin_port=9901))["admin"] == {
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 9901}}
    }


def test_the_access_log_holds_neither_query_nor_session() -> None:
    assert "access_log" not in connection_manager(EnvoyOptions())
    (log,) = connection_manager(EnvoyOptions(access_log=True))["access_log"]
    fields = log["typed_config"]["log_format"]["json_format"]
    assert fields["path"] == "%PATH(NQ)%"
    assert not [name for name in fields if "session" in name]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"listen_address": "gateway"}, "listen address must be an IP address, not 'gateway'"),
        ({"admin_address": "localhost"}, "admin address must be an IP address, not 'localhost'"),
        ({"picker_address": ""}, "picker address must be an IP address or a DNS name, not ''"),
        ({"picker_address": "10.0.0.256"}, "picker address must be an IP address or a DNS name, not '10.0.0.256'"),
        ({"picker_address": "http://epp"}, "picker address must be an IP address or a DNS name, not 'http://epp'"),
        ({"picker_address": "epp:9002"}, "picker address must be an IP address or a DNS name, not 'epp:9002'"),
        ({"listen_port": 65536}, "listen port must be 0 to 65535, not 65536"),
        ({"picker_port": 0}, "picker port must be 1 to 65535, not 0"),
        ({"admin_port": -1}, "admin port must be 0 to 65535, not -1"),
        ({"admin_port": 8080}, "listen port and admin port must differ, both are 8080"),
        (
            {"tls": False, "picker_ca": Path("ca.pem")},
            "picker CA is of no use when the picker is spoken to in plaintext",
        ),
        ({"picker_server_name": "epp"}, "picker server name is of no use without a picker CA to verify it"),
        ({"worker_connect_timeout_seconds": 0.0}, "worker connect timeout must be above 0 seconds, not 0.0"),
        ({"message_timeout_seconds": float("nan")}, "message timeout must be above 0 seconds, not nan"),
    ],
)
def test_a_wrong_option_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        EnvoyOptions(**wrong)
    assert str(refusal.value) == message
