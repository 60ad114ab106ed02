"""TLS of the capacity feed: which files secure it, read anew for each connection.

Both ends name theirs here: a shared CA and, where each end proves itself to the other, a certificate and its key.
Files are checked when they are read, because gRPC says nothing of a bad one but "handshake failed"; a certificate
renewed in place (cert-manager, a Secret that is mounted) is used from the next connection on.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc


class FeedTlsError(ValueError):
    """Files that cannot secure the feed; the message is one line that names the file at fault."""


class Pem(NamedTuple):
    """The contents of the files, None where there is no such file; all PEM."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """``ca``: who the other end must be vouched for by; ``certificate`` (leaf first) and ``key``: what this one shows.

    Certificate and key come together. Raises FeedTlsError where one is missing; the files themselves are not looked
    at before they are read.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise FeedTlsError("a certificate and its key belong together: give both --feed-cert and --feed-key")

    def read(self) -> Pem:
        """The contents as they are now. Raises FeedTlsError when a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        pem = Pem(_read(self.ca), _read(self.certificate), _read(self.key))
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError:
                raise FeedTlsError(f"{self.ca}: holds no PEM certificate of a CA") from None
        if self.certificate is not None:
            try:
                # Without a password of our own OpenSSL would ask for one on the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
            except ssl.SSLError as error:
                reason = (error.reason or "not PEM").lower().replace("_", " ")
                raise FeedTlsError(f"{self.certificate}, {self.key}: not a certificate and its key: {reason}") from None
        return pem


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """The picker's end: the operator must be vouched for by the CA. Raises FeedTlsError."""
    if files.ca is None:
        raise FeedTlsError("TLS on the feed needs the CA that vouches for the operator: give --feed-ca")
    pem = files.read()
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)


def _read(file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        return file.read_bytes()
    except OSError as error:
        raise FeedTlsError(f"{file}: cannot be read: {error.strerror or error}") from None
