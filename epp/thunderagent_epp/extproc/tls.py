"""The certificate of the picker's port: one made at start by default, or files that may be renewed under it.

The server takes its credentials from here once; gRPC then asks for the certificate at each handshake, so a renewed
pair (cert-manager, a Secret that is mounted) is served from the next connection on and running streams never notice.
Protects from a renewal gone wrong: a pair that cannot be read or does not match is reported once, and the last good
one goes on being served.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from thunderagent_epp.telemetry import logs

log = logs.logger("extproc")

_SELF_SIGNED_DAYS: Final = 3650
_CLOCK_SKEW: Final = datetime.timedelta(hours=1)


class CertificateError(ValueError):
    """A certificate and key that cannot be served; the message is one line that names the file."""


class KeyPair(NamedTuple):
    """A certificate chain, leaf first, and its private key; both PEM."""

    certificate: bytes
    key: bytes


def server_credentials(certificate: Path | None = None, key: Path | None = None) -> grpc.ServerCredentials:
    """Credentials for the picker's port: from the two files, reloaded when they change, or self-signed without them.

    Raises CertificateError when only one file is given, or when the two cannot be served at the start.
    """
    if certificate is None and key is None:
        return grpc.ssl_server_credentials([_key_first(self_signed(own_names()))])
    if certificate is None or key is None:
        raise CertificateError("a TLS certificate and its key belong together: give both --tls-cert and --tls-key")
    files = CertificateFiles(certificate, key)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(files.served),
        files.newer,  # type: ignore[arg-type]  # None is how a fetcher says that nothing changed
    )


class CertificateFiles:
    """A certificate and its key in two files, of which the last good content is served.

    ``newer`` is called by gRPC at each handshake, from a thread of its own, one call at a time. Raises
    CertificateError when the files cannot be served to begin with.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self._seen = self._state()
        self._served = read_pair(certificate, key)
        self._problem: str | None = None

    @property
    def served(self) -> KeyPair:
        """The pair in force."""
        return self._served

    def newer(self) -> grpc.ServerCertificateConfiguration | None:
        """The pair in the files when it is good and not the one in force, else None: keep what there is."""
        state = self._state()
        if state == self._seen:
            return None
        self._seen = state
        try:
            pair = read_pair(self._certificate, self._key)
        except CertificateError as problem:
            if str(problem) != self._problem:
                self._problem = str(problem)
                log.error("new TLS certificate refused; the last good one stays", problem=self._problem)
            return None
        self._problem = None
        if pair == self._served:
            return None
        self._served = pair
        log.info("TLS certificate renewed", path=str(self._certificate), not_after=_not_after(pair).isoformat())
        return _configuration(pair)

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What changes when a file does; a Secret's mount swaps a link, so links are followed."""
        return tuple(_stat(file) for file in (self._certificate, self._key))


def read_pair(certificate: Path, key: Path) -> KeyPair:
    """Read and check a pair: PEM, an unencrypted key, and the key of the first certificate.

    Raises CertificateError that names the file at fault.
    """
    pair = KeyPair(_read(certificate, "TLS certificate"), _read(key, "TLS key"))
    try:
        chain = x509.load_pem_x509_certificates(pair.certificate)
    except ValueError:
        raise CertificateError(f"TLS certificate {certificate} is not a PEM certificate") from None
    try:
        private = serialization.load_pem_private_key(pair.key, password=None)
    except TypeError:
        raise CertificateError(f"TLS key {key} is encrypted; a key without a passphrase is needed") from None
    except ValueError:
        raise CertificateError(f"TLS key {key} is not a PEM private key") from None
    if chain[0].public_key() != private.public_key():
        raise CertificateError(f"TLS key {key} is not the key of certificate {certificate}")
    return pair


def own_names() -> tuple[str, ...]:
    """The names and addresses this process may be called by: localhost, the host's name, and POD_IP where it is set."""
    names = ["localhost", "127.0.0.1", "::1", socket.gethostname(), os.environ.get("POD_IP", "")]
    return tuple(dict.fromkeys(name for name in names if name))


def self_signed(names: Iterable[str]) -> KeyPair:
    """Make a certificate for DNS names and IP addresses, valid for ten years, with a new P-256 key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "thunderagent-epp")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=_SELF_SIGNED_DAYS))
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _not_after(pair: KeyPair) -> datetime.datetime:
    return x509.load_pem_x509_certificate(pair.certificate).not_valid_after_utc


def _configuration(pair: KeyPair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([_key_first(pair)])


def _key_first(pair: KeyPair) -> tuple[bytes, bytes]:
    return pair.key, pair.certificate


def _read(file: Path, what: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CertificateError(f"{what} {file} cannot be read: {error.strerror}") from None


def _stat(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
