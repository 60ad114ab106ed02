from __future__ import annotations

import socket
import sys

import grpc
import pytest

from thunderagent_epp.extproc.ports import listen
from thunderagent_epp.extproc.tls import server_credentials


async def test_a_free_port_is_told() -> None:
    server = grpc.aio.server()
    assert 0 < listen(server, "127.0.0.1", 0) < 65536
    assert 0 < listen(server, "127.0.0.1", 0, server_credentials()) < 65536


@pytest.mark.parametrize("tls", [False, True])
async def test_a_port_that_is_taken_is_told_in_the_systems_words(tls: bool) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"^cannot listen on 127.0.0.1:{port}: Address already in use$"):
            listen(server, "127.0.0.1", port, server_credentials() if tls else None)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other words")
@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("192.0.2.1", "cannot listen on 192.0.2.1:0: Cannot assign requested address"),
        ("no.such.host.invalid", "cannot listen on no.such.host.invalid:0: "),
        ("2001:db8::1", r"cannot listen on \[2001:db8::1\]:0: "),
    ],
)
async def test_an_address_that_is_not_this_machines_is_told(host: str, message: str) -> None:
    with pytest.raises(OSError, match=f"^{message}"):
        listen(grpc.aio.server(), host, 0)
