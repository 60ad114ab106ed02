"""The fixture picker of the Gateway API Inference Extension conformance suite: `thunderagent epp --conformance`.

The suite tests gateways, and needs a picker that sends each request where the test says and reports who served it. It
stands where the director stands, behind the same server and protocol, and shares nothing with it: no program, no hold,
no load. Never for real traffic, since any client may steer its request; so it runs only when asked for by name.

A request goes, in turn, to the endpoints that are left of

1. the pool: what ``endpoints`` name, if anything. A headless Service's name stands for every pod behind it;
2. the request header ``test-epp-endpoint-selection``, entries of which are ``ip`` or ``ip:port``;
3. the proxy's subset hint.

Without a pool the header alone is the set, or else the hint; an entry without a port then means ``default_port``.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from itertools import count
from typing import Final

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from thunderagent_epp.extproc import wire
from thunderagent_epp.extproc.actions import Cause
from thunderagent_epp.extproc.errors import Refusal, Refused
from thunderagent_epp.extproc.subset import Subset
from thunderagent_epp.extproc.turn import Placement
from thunderagent_epp.requests.answer import AnswerReader
from thunderagent_epp.requests.inference import InferenceRequest
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.telemetry.logs import logger
from thunderagent_epp.telemetry.metrics import Metrics, Outcome
from thunderagent_epp.telemetry.status import Gauges, Readiness, Status

SELECTION_HEADER: Final = "test-epp-endpoint-selection"
SERVED_HEADER: Final = "x-conformance-test-served-endpoint"
SELECTED_HEADER: Final = "x-conformance-test-selected-endpoint"

NO_BALANCER_METADATA: Final = "fail: missing envoy lb metadata"
NO_SERVED_METADATA: Final = "fail: missing destination endpoint served metadata"

DEFAULT_PORT: Final = 3000
"""Where the suite's echo servers listen."""

_RESOLVE_SECONDS: Final = 2.0

_log = logger("extproc")


@dataclass(slots=True)
class ConformanceTurn:
    """One request; it is never held."""

    placement: Placement
    path: str
    metrics: Metrics

    async def released(self) -> Placement:
        """Where it goes; never waited for."""
        return self.placement

    def responding(self, served: str | None) -> None:
        """Nothing is made of it but what the answer's headers say."""

    def progress(self, events: int) -> None:
        """Nothing is made of it."""

    def ended(self, completed: bool, reader: AnswerReader | None, cause: Cause) -> None:
        """Count it."""
        self.metrics.request(self.path, Outcome.COMPLETED if completed else Outcome.ABORTED)


class ConformancePicker:
    """See the module. ``endpoints`` are ``(host, port)`` with an IP address or a name, which is looked up again and
    again; none: the pool is not known, and every endpoint a request names is taken."""

    def __init__(
        self, metrics: Metrics, endpoints: Collection[tuple[str, int]] = (), default_port: int = DEFAULT_PORT
    ) -> None:
        self.policy: Final = RequestPolicy()
        self._metrics = metrics
        self._endpoints = endpoints
        self._default_port = default_port
        self._pool: tuple[str, ...] = ()
        self._turn = count()
        self._draining = self._refusing = False
        self._open_streams: Callable[[], int] = lambda: 0

    def admit(self, request: InferenceRequest, *, subset: Subset | None, body_bytes: int) -> ConformanceTurn:
        """Send a request on its way. Raises Refused where there is no endpoint for it, and while draining."""
        if self._refusing:
            raise Refused(Refusal.DRAINING)
        candidates = self._candidates(request, subset)
        if not candidates:
            raise Refused(Refusal.NO_ENDPOINTS)
        endpoint = candidates[next(self._turn) % len(candidates)]
        placement = Placement(endpoint, answer_headers=partial(report, endpoint))
        return ConformanceTurn(placement, request.path, self._metrics)

    def _candidates(self, request: InferenceRequest, subset: Subset | None) -> list[str]:
        asked = Subset.of(request.headers.all(SELECTION_HEADER))
        sets = [each for each in (asked if asked.members else None, subset) if each is not None]
        if self._endpoints:
            pool = self._pool
        elif sets:
            pool = _endpoints_of(sets[0], self._default_port)
        else:
            pool = ()
        return [endpoint for endpoint in pool if all(each.allows(endpoint) for each in sets)]

    async def run(self) -> None:
        """Keep the pool as its names say, until cancelled."""
        while True:
            found = await asyncio.gather(*(_resolved(host, port) for host, port in self._endpoints))
            pool = tuple(sorted({endpoint for endpoints in found for endpoint in endpoints}))
            if pool != self._pool:
                self._pool = pool
                _log.info("conformance pool", endpoints=pool)
            await asyncio.sleep(_RESOLVE_SECONDS)

    # -- what a picker process asks of a picker --------------------------------------------------------------------

    @property
    def readiness(self) -> Readiness:
        """Ready from the start."""
        return Readiness.DRAINING if self._draining else Readiness.OK

    def retire(self) -> None:
        """Be ready no longer; requests are still taken."""
        self._draining = True

    def drain(self) -> None:
        """Refuse every new request."""
        self._draining = self._refusing = True

    def watch_streams(self, open_streams: Callable[[], int]) -> None:
        """Where the number of open streams can be asked for."""
        self._open_streams = open_streams

    def gauges(self) -> Gauges:
        """The numbers of this moment."""
        return Gauges(readiness=self.readiness, open_streams=self._open_streams())

    def status(self) -> Status:
        """Nothing but whether it is ready: it keeps no state."""
        return Status(readiness=self.readiness)


def report(selected: str, message: ProcessingRequest) -> Mapping[str, str]:
    """The headers of an answer: the endpoint selected, and the one that served by the gateway's own word."""
    served = wire.served_endpoint(message)
    if served is None:
        served = NO_SERVED_METADATA if wire.has_balancer_metadata(message) else NO_BALANCER_METADATA
    return {SERVED_HEADER: served, SELECTED_HEADER: selected}


def _endpoints_of(subset: Subset, default_port: int) -> tuple[str, ...]:
    """The members of a set as endpoints; what is no IP address and port is left out."""
    endpoints = (_endpoint(host, port or str(default_port)) for host, port in subset.members)
    return tuple(sorted(endpoint for endpoint in endpoints if endpoint is not None))


def _endpoint(host: str, port: str) -> str | None:
    try:
        version = ip_address(host).version
    except ValueError:
        return None
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        return None
    return f"[{host}]:{port}" if version == 6 else f"{host}:{port}"


async def _resolved(host: str, port: int) -> list[str]:
    """The endpoints a host stands for now; none while its name is not known."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        _log.warning("conformance endpoint not found", host=host, reason=error.strerror)
        return []
    return [endpoint for *_, address in found if (endpoint := _endpoint(str(address[0]), str(port))) is not None]
