"""Listening with gRPC, and saying in the system's words why that cannot be.

The picker's port and the health port are had through here. gRPC by itself only tells that it failed. What the user
can change is an option, so `named_by` adds its name.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import grpc


def listen(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Add a port (0 takes a free one) on ``host`` to a server, without TLS if ``credentials`` is None.

    Returns the port. Raises OSError that names the address and says what is in the way.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {_reason(host, port) or error}") from error


@contextlib.contextmanager
def named_by(option: str, host: str, host_option: str = "--host") -> Iterator[None]:
    """Name the option at fault when listening within the block fails: the port's, or the host's if no port would do.

    Raises OSError in place of the one that came.
    """
    try:
        yield
    except OSError as error:
        # Asked for a free port, the system objects to the host alone.
        reason = _reason(host, 0)
        raise OSError(f"{option}: {error}" if reason is None else f"{host_option}: {host}: {reason}") from error


def _reason(host: str, port: int) -> str | None:
    """What the system says to the same wish; None if it has no objection now."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    return None
