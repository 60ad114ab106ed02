"""A certificate authority for tests: vouches for names and addresses, and writes PEM files."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from thunderagent_epp.feed.tls import TlsFiles


class Authority:
    def __init__(self, name: str) -> None:
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.certificate = _pem(builder.sign(self._key, hashes.SHA256()))

    def issue(self, address: str = "127.0.0.1", days: int = 1) -> tuple[bytes, bytes]:
        """A certificate for an IP address and its key; one of a negative number of days has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "leaf")])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        builder = self._builder(subject, key, days).add_extension(names, critical=False)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return _pem(builder.sign(self._key, hashes.SHA256())), private

    def files(self, directory: Path, trusted: Authority | None = None) -> TlsFiles:
        """A new certificate's files, and as CA that of ``trusted``, or of this authority."""
        directory.mkdir(exist_ok=True)
        certificate, key = self.issue()
        files = TlsFiles(directory / "ca.crt", directory / "tls.crt", directory / "tls.key")
        for file, content in zip(
            (files.ca, files.certificate, files.key),
            ((trusted or self).certificate, certificate, key),
            strict=True,
        ):
            assert file is not None
            file.write_bytes(content)
        return files

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=30))
            .not_valid_after(now + datetime.timedelta(days=days))
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
