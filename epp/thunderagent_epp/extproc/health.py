"""The gRPC health and reflection services of the picker: what probes, gateways and grpcurl ask.

One `Health` serves both ports, the picker's and the one kept for probes (extproc.md, *Process*). Readiness follows
what the server tells it: a snapshot has arrived and no drain has begun. Liveness needs no telling: the answer comes
from the same event loop that decides requests, so a loop that no longer turns does not answer.
"""

from __future__ import annotations

from typing import Final

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

EXT_PROC_SERVICE: Final[str] = external_processor_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name

READINESS_NAMES: Final = ("", "readiness", "inference-extension", EXT_PROC_SERVICE)
"""Names that say whether requests are welcome; ``inference-extension`` is what GIE's own charts ask for."""

LIVENESS_NAME: Final = "liveness"

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class _Servicer(health.aio.HealthServicer):  # type: ignore[misc]  # the package has no types
    """The library's servicer, with the one method of the protocol that it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self._listed: dict[str, health_pb2.HealthCheckResponse] = {}

    async def set(self, service: str, status: int) -> None:
        self._listed[service] = health_pb2.HealthCheckResponse(status=status)
        await super().set(service, status)

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: object
    ) -> health_pb2.HealthListResponse:
        return health_pb2.HealthListResponse(statuses=self._listed)


class Health:
    """Answers Check, Watch and List; a name nobody knows is NOT_FOUND, and so is every name until first told."""

    def __init__(self) -> None:
        self._servicer = _Servicer()

    async def set_ready(self, ready: bool) -> None:
        """Tell every readiness name, and everyone who watches one, whether requests are welcome."""
        await self._servicer.set(LIVENESS_NAME, _SERVING)
        for name in READINESS_NAMES:
            await self._servicer.set(name, _SERVING if ready else _NOT_SERVING)

    def add_to(self, server: grpc.aio.Server, *services: str) -> None:
        """Put health and reflection on a server before it starts; ``services`` are the full names of its others."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection((health.SERVICE_NAME, reflection.SERVICE_NAME, *services), server)
