"""Listening with gRPC, and saying in the system's words why that cannot be.

The picker's port and the health port are had through here. gRPC by itself only tells that it failed.
"""

from __future__ import annotations

import socket

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
