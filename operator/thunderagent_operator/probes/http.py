"""One document of one worker over HTTP: the only place where a probe touches the network.

A worker is not trusted: an answer is waited for so long and read so far, redirects are not followed, cookies not kept,
compressed bodies not unpacked. A connection is not kept either: there are thousands of workers, each asked seldom.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias

import aiohttp
from yarl import URL

from thunderagent_epp import __version__
from thunderagent_operator.probes.plan import MetricsText, Question
from thunderagent_operator.telemetry import ProbeResult

BODY_BYTES_MAX: Final = 4 * 1024 * 1024
"""Some ten times the metrics of an engine with many ranks."""

TIMEOUT: Final = aiohttp.ClientTimeout(total=5, sock_connect=2)

_HEADERS: Final = {
    "Accept": "text/plain;version=0.0.4, application/json;q=0.9",
    "Accept-Encoding": "identity",
    "User-Agent": f"thunderagent-operator/{__version__}",
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where the documents of one worker rank are; ``host`` is an IP, in brackets if it is a v6 one."""

    host: str
    port: int
    metrics_path: str = "/metrics"
    metrics_port: int | None = None
    scheme: Literal["http", "https"] = "http"

    def url(self, question: Question) -> URL:
        """Where the answer to a question is."""
        port, path = self.port, question.path
        if isinstance(question, MetricsText):
            port, path = self.metrics_port or self.port, question.path or self.metrics_path
        return URL(f"{self.scheme}://{self.host}:{port}{path}", encoded=True)


class ProbeError(Exception):
    """No answer that could be read; the text says why."""

    def __init__(self, result: ProbeResult, message: str) -> None:
        super().__init__(message)
        self.result = result


Fetch: TypeAlias = Callable[[Address, Question], Awaitable[bytes | None]]
"""Gets a document; None for an answer with any status but 200. Raises ProbeError."""


class HttpFetch:
    """Fetches documents while it is open, as an asynchronous context manager; it is a `Fetch`."""

    def __init__(self, timeout: aiohttp.ClientTimeout = TIMEOUT, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self._timeout = timeout
        self._body_bytes_max = body_bytes_max
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # A pod has no certificate for its address: https keeps out eavesdroppers, not an impostor in the network.
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=False)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __call__(self, address: Address, question: Question) -> bytes | None:
        """Get a document. Raises ProbeError."""
        if self._session is None:
            raise RuntimeError("HttpFetch is used outside its context")
        url = address.url(question)
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                return await self._body(response) if response.status == 200 else None
        except TimeoutError:
            raise ProbeError(ProbeResult.TIMEOUT, f"{url}: no answer in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ProbeError(ProbeResult.UNREACHABLE, f"{url}: {str(error)[:200] or type(error).__name__}") from None

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > self._body_bytes_max:
                raise ProbeError(ProbeResult.TOO_LARGE, f"{response.url}: more than {self._body_bytes_max} bytes")
            chunks.append(chunk)
        return b"".join(chunks)
