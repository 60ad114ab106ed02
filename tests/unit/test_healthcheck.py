"""The HEALTHCHECK of the image, on its own: it needs no image."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

SCRIPT = Path(__file__).parents[2] / "docker" / "healthcheck.py"


@pytest.fixture
def healthy() -> Callable[[int], bool | None]:
    specification = importlib.util.spec_from_file_location("healthcheck", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    check: Callable[[int], bool | None] = module.healthy
    return check


@contextmanager
def pages(status: int) -> Iterator[int]:
    """A process whose ``/healthz`` answers so; yields its port."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Pages) as server:
        Thread(target=server.handle_request, daemon=True).start()
        yield server.server_port


def test_a_process_that_works_is_healthy(healthy: Callable[[int], bool | None]) -> None:
    with pages(200) as port:
        assert healthy(port) is True


def test_a_process_that_says_it_does_not_is_not(healthy: Callable[[int], bool | None]) -> None:
    with pages(503) as port:
        assert healthy(port) is False


def test_nothing_that_listens_is_not_a_fault_of_the_other_command(healthy: Callable[[int], bool | None]) -> None:
    with pages(200) as port:
        healthy(port)
    assert healthy(port) is None
