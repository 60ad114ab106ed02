from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from thunderagent_epp.extproc.tls import CertificateError, KeyPair, own_names, self_signed, server_credentials


def names(certificate: bytes) -> tuple[list[str], list[str]]:
    extension = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    addresses = extension.value.get_values_for_type(x509.IPAddress)
    return extension.value.get_values_for_type(x509.DNSName), [str(address) for address in addresses]


@asynccontextmanager
async def serving(credentials: grpc.ServerCredentials) -> AsyncIterator[int]:
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def served_by(port: int) -> bytes:
    """The certificate a new connection is shown, PEM."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(der).encode()
    finally:
        writer.transport.abort()


class Files:
    def __init__(self, directory: Path) -> None:
        self.certificate = directory / "tls.crt"
        self.key = directory / "tls.key"
        self._written = 0

    def write(self, certificate: bytes, key: bytes) -> None:
        for file, content in ((self.certificate, certificate), (self.key, key)):
            file.write_bytes(content)
            # Files written within one tick of the clock must differ too.
            self._written += 1
            os.utime(file, ns=(self._written, self._written))


@pytest.fixture(scope="module")
def first() -> KeyPair:
    return self_signed(["first.example"])


@pytest.fixture(scope="module")
def second() -> KeyPair:
    return self_signed(["second.example"])


@pytest.fixture
def files(tmp_path: Path, first: KeyPair) -> Files:
    made = Files(tmp_path)
    made.write(*first)
    return made


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What is logged, as it is logged."""
    events: list[dict[str, str]] = []

    class Recorder:
        def info(self, event: str, **keys: str) -> None:
            events.append({"level": "info", "event": event, **keys})

        def error(self, event: str, **keys: str) -> None:
            events.append({"level": "error", "event": event, **keys})

    monkeypatch.setattr("thunderagent_epp.extproc.tls.log", Recorder())
    return events


def test_the_picker_is_called_by_localhost_its_host_name_and_its_pod_ip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "epp-0")
    monkeypatch.setenv("POD_IP", "fd00::7")
    assert own_names() == ("localhost", "127.0.0.1", "::1", "epp-0", "fd00::7")
    monkeypatch.delenv("POD_IP")
    assert own_names() == ("localhost", "127.0.0.1", "::1", "epp-0")


def test_a_self_signed_certificate_is_for_the_names_and_addresses_given() -> None:
    assert names(self_signed(["localhost", "epp-0", "10.1.2.3", "fd00::7"]).certificate) == (
        ["localhost", "epp-0"],
        ["10.1.2.3", "fd00::7"],
    )


def test_a_self_signed_certificate_is_never_the_same_twice(first: KeyPair) -> None:
    again = self_signed(["first.example"])
    assert again.key != first.key
    assert again.certificate != first.certificate


async def test_without_files_the_port_shows_a_self_signed_certificate() -> None:
    async with serving(server_credentials()) as port:
        dns, addresses = names(await served_by(port))
    assert dns[0] == "localhost"
    assert "127.0.0.1" in addresses


async def test_a_client_that_trusts_the_certificate_is_served(first: KeyPair, files: Files) -> None:
    trusted = grpc.ssl_channel_credentials(first.certificate)
    options = [("grpc.ssl_target_name_override", "first.example")]
    async with (
        serving(server_credentials(files.certificate, files.key)) as port,
        grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted, options=options) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await channel.unary_unary("/no.such.Service/Method")(b"")
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_renewed_pair_is_served_to_the_next_connection(
    files: Files, first: KeyPair, second: KeyPair, reported: list[dict[str, str]]
) -> None:
    async with serving(server_credentials(files.certificate, files.key)) as port:
        assert await served_by(port) == first.certificate
        assert await served_by(port) == first.certificate
        files.write(*second)
        assert await served_by(port) == second.certificate
        assert await served_by(port) == second.certificate
    assert [(each["level"], each["event"]) for each in reported] == [("info", "TLS certificate renewed")]


async def test_a_bad_new_pair_is_reported_once_and_the_old_one_stays(
    files: Files, first: KeyPair, second: KeyPair, reported: list[dict[str, str]]
) -> None:
    async with serving(server_credentials(files.certificate, files.key)) as port:
        assert await served_by(port) == first.certificate
        files.write(second.certificate, first.key)
        assert await served_by(port) == first.certificate
        files.write(second.certificate, first.key)
        assert await served_by(port) == first.certificate
        files.write(*second)
        assert await served_by(port) == second.certificate
    assert [(each["level"], each.get("problem")) for each in reported] == [
        ("error", f"TLS key {files.key} is not the key of certificate {files.certificate}"),
        ("info", None),
    ]


async def test_files_that_vanish_leave_the_old_pair_in_force(
    files: Files, first: KeyPair, reported: list[dict[str, str]]
) -> None:
    async with serving(server_credentials(files.certificate, files.key)) as port:
        assert await served_by(port) == first.certificate
        files.certificate.unlink()
        assert await served_by(port) == first.certificate
        assert await served_by(port) == first.certificate
    assert [each["problem"] for each in reported] == [
        f"TLS certificate {files.certificate} cannot be read: No such file or directory"
    ]


async def test_a_mounted_secret_that_swaps_its_link_is_noticed(
    tmp_path: Path, first: KeyPair, second: KeyPair, reported: list[dict[str, str]]
) -> None:
    for version, pair in (("v1", first), ("v2", second)):
        (tmp_path / version).mkdir()
        Files(tmp_path / version).write(*pair)
    link = tmp_path / "current"
    link.symlink_to("v1")
    async with serving(server_credentials(link / "tls.crt", link / "tls.key")) as port:
        assert await served_by(port) == first.certificate
        (tmp_path / "next").symlink_to("v2")
        (tmp_path / "next").replace(link)
        assert await served_by(port) == second.certificate


def test_one_file_without_the_other_is_refused(files: Files) -> None:
    with pytest.raises(CertificateError, match="give both --tls-cert and --tls-key"):
        server_credentials(files.certificate, None)
    with pytest.raises(CertificateError, match="give both --tls-cert and --tls-key"):
        server_credentials(None, files.key)


def test_what_cannot_be_served_at_the_start_is_named(files: Files, first: KeyPair, second: KeyPair) -> None:
    def refusal() -> str:
        with pytest.raises(CertificateError) as refused:
            server_credentials(files.certificate, files.key)
        return str(refused.value)

    files.write(b"no certificate", first.key)
    assert refusal() == f"TLS certificate {files.certificate} is not a PEM certificate"
    files.write(first.certificate, b"no key")
    assert refusal() == f"TLS key {files.key} is not a PEM private key"
    files.write(first.certificate, second.key)
    assert refusal() == f"TLS key {files.key} is not the key of certificate {files.certificate}"
    encrypted = serialization.load_pem_private_key(first.key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"passphrase"),
    )
    files.write(first.certificate, encrypted)
    assert refusal() == f"TLS key {files.key} is encrypted; a key without a passphrase is needed"
    files.key.unlink()
    assert refusal() == f"TLS key {files.key} cannot be read: No such file or directory"
