"""An ext_proc server of the picker's shape that decides nothing: what the EPP is measured against.

It speaks the same protocol with the same library in one process: it collects the request body, answers headers with
a fixed destination and then the body, and echoes the response. What the EPP costs beyond this is its decisions.

    python bench/bare_picker.py --destination 127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc_grpc

DESTINATION_HEADER = "x-gateway-destination-endpoint"
CHUNK_BYTES = 62_000

Seen = Callable[[ext_proc.ProcessingRequest], None]


@dataclass
class BarePicker(ext_proc_grpc.ExternalProcessorServicer):
    """Sends every request to ``destination``; ``seen`` is called with each message, in order, before its answer."""

    destination: str
    seen: Seen | None = None
    _head: ext_proc.ProcessingResponse = field(init=False)

    def __post_init__(self) -> None:
        self._head = ext_proc.ProcessingResponse(
            request_headers=ext_proc.HeadersResponse(
                response=ext_proc.CommonResponse(
                    clear_route_cache=True,
                    header_mutation=ext_proc.HeaderMutation(
                        set_headers=[
                            base_pb2.HeaderValueOption(
                                header=base_pb2.HeaderValue(
                                    key=DESTINATION_HEADER, raw_value=self.destination.encode()
                                ),
                                append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
                            )
                        ]
                    ),
                )
            )
        )
        self._head.dynamic_metadata["envoy.lb"] = {DESTINATION_HEADER: self.destination}

    async def Process(  # noqa: N802
        self,
        request_iterator: AsyncIterator[ext_proc.ProcessingRequest],
        context: grpc.aio.ServicerContext[ext_proc.ProcessingRequest, ext_proc.ProcessingResponse],
    ) -> AsyncIterator[ext_proc.ProcessingResponse]:
        body = bytearray()
        answered = False
        async for message in request_iterator:
            if self.seen is not None:
                self.seen(message)
            kind = message.WhichOneof("request")
            if kind == "request_headers":
                if message.request_headers.end_of_stream:
                    answered = True
                    yield self._head
            elif kind == "request_body":
                # Envoy may send the last chunk of a large body twice.
                if answered:
                    continue
                body += message.request_body.body
                if message.request_body.end_of_stream:
                    answered = True
                    yield self._head
                    for part in _chunks(bytes(body), ends=True):
                        yield ext_proc.ProcessingResponse(request_body=part)
            elif kind == "request_trailers":
                if not answered:
                    answered = True
                    yield self._head
                    for part in _chunks(bytes(body), ends=False):
                        yield ext_proc.ProcessingResponse(request_body=part)
                yield ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())
            elif kind == "response_headers":
                yield ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse())
            elif kind == "response_body":
                chunk = message.response_body
                yield ext_proc.ProcessingResponse(response_body=_streamed(chunk.body, chunk.end_of_stream))
            elif kind == "response_trailers":
                yield ext_proc.ProcessingResponse(response_trailers=ext_proc.TrailersResponse())


def _chunks(body: bytes, *, ends: bool) -> list[ext_proc.BodyResponse]:
    """Cut a body to chunks; the last one ends the message unless trailers do. An empty body is one empty chunk."""
    starts = range(0, len(body) or 1, CHUNK_BYTES)
    return [_streamed(body[start : start + CHUNK_BYTES], ends and start == starts[-1]) for start in starts]


def _streamed(body: bytes, end_of_stream: bool) -> ext_proc.BodyResponse:
    return ext_proc.BodyResponse(
        response=ext_proc.CommonResponse(
            body_mutation=ext_proc.BodyMutation(
                streamed_response=ext_proc.StreamedBodyResponse(body=body, end_of_stream=end_of_stream)
            )
        )
    )


@contextlib.asynccontextmanager
async def running_bare_picker(
    destination: str, *, port: int = 0, seen: Seen | None = None, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[int]:
    """Serve on loopback for the length of the block, in plaintext without credentials; gives the port it has."""
    server = grpc.aio.server()
    ext_proc_grpc.add_ExternalProcessorServicer_to_server(BarePicker(destination, seen), server)
    address = f"127.0.0.1:{port}"
    bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace=None)


async def _serve(destination: str, port: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with running_bare_picker(destination, port=port) as bound:
        # The benchmark that starts this process reads the port from here.
        print(bound, flush=True)
        await stopped.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="A picker that sends every request to one endpoint.")
    parser.add_argument("--destination", required=True, metavar="IP:PORT", help="the endpoint of every request")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one, printed)")
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.destination, arguments.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
