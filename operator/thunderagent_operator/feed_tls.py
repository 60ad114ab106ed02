"""The operator's end of TLS on the feed, with files that may be renewed under it.

gRPC asks for the files at each handshake, so renewed ones are shown and believed from the next connection on, and
running streams never notice. Protects from a renewal gone wrong: files that cannot be used are reported once, and the
last good ones stay in force.
"""

from __future__ import annotations

from pathlib import Path

import grpc

from thunderagent_epp.feed.tls import FeedTlsError, Pem, TlsFiles
from thunderagent_epp.telemetry import logs

log = logs.logger("operator")


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Show ``files``' certificate; with a CA among them, serve only pickers that it vouches for.

    Raises FeedTlsError when the files cannot be used to begin with.
    """
    if files.certificate is None:
        raise FeedTlsError("TLS on the feed needs a certificate of the operator: give --feed-cert and --feed-key")
    renewal = _Renewal(files)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(renewal.served),
        renewal.newer,  # type: ignore[arg-type]  # None is how a fetcher says that nothing changed
        require_client_authentication=files.ca is not None,
    )


class _Renewal:
    """The last good content of the files. ``newer`` is called by gRPC, from a thread of its own, one call at a time."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = self._state()
        self.served = files.read()
        self._problem: str | None = None

    def newer(self) -> grpc.ServerCertificateConfiguration | None:
        state = self._state()
        if state == self._seen:
            return None
        self._seen = state
        try:
            pem = self._files.read()
        except FeedTlsError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("new TLS files of the feed refused; the last good ones stay", problem=self._problem)
            return None
        self._problem = None
        if pem == self.served:
            return None
        self.served = pem
        log.info("TLS files of the feed renewed", path=str(self._files.certificate))
        return _configuration(pem)

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What changes when a file does; a Secret's mount swaps a link, so links are followed."""
        return tuple(_stat(file) for file in (self._files.ca, self._files.certificate, self._files.key) if file)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.key is not None
    assert pem.certificate is not None
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], root_certificates=pem.ca)


def _stat(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
