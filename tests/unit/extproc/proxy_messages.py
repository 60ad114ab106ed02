"""What a proxy sends, spelled as short as the case table of extproc.md: H, B, T and h, b, t."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)

CHAT = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED


def header_map(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> HeaderMap:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return HeaderMap(headers=[HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs])


def metadata(fields: Mapping[str, Mapping[str, Any]]) -> Metadata:
    made = Metadata()
    for namespace, content in fields.items():
        made.filter_metadata[namespace].update(content)
    return made


def subset_hint(value: Any) -> Metadata:
    return metadata({"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": value}})


def protocol(
    request: ProcessingMode.BodySendMode = DUPLEX,
    response: ProcessingMode.BodySendMode = DUPLEX,
    *,
    without_waiting: bool = False,
) -> ProtocolConfiguration:
    return ProtocolConfiguration(
        request_body_mode=request,
        response_body_mode=response,
        send_body_without_waiting_for_header_response=without_waiting,
    )


def H(  # noqa: N802
    headers: Mapping[str, str] | Iterable[tuple[str, str]] = CHAT,
    *,
    end: bool = False,
    context: Metadata | None = None,
    config: ProtocolConfiguration | None = None,
) -> ProcessingRequest:
    return ProcessingRequest(
        request_headers=HttpHeaders(headers=header_map(headers), end_of_stream=end),
        metadata_context=context,
        protocol_config=config,
    )


def B(body: bytes = b"{}", *, end: bool = True, context: Metadata | None = None) -> ProcessingRequest:  # noqa: N802
    return ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=end), metadata_context=context)


def T() -> ProcessingRequest:  # noqa: N802
    return ProcessingRequest(request_trailers=HttpTrailers(trailers=header_map({"x-checksum": "1"})))


def h(
    status: str = "200",
    content_type: str = "text/event-stream",
    *,
    end: bool = False,
    context: Metadata | None = None,
    config: ProtocolConfiguration | None = None,
) -> ProcessingRequest:
    headers = header_map({":status": status, "content-type": content_type})
    return ProcessingRequest(
        response_headers=HttpHeaders(headers=headers, end_of_stream=end),
        metadata_context=context,
        protocol_config=config,
    )


def b(body: bytes = b"data: {}\n\n", *, end: bool = False) -> ProcessingRequest:
    return ProcessingRequest(response_body=HttpBody(body=body, end_of_stream=end))


def t() -> ProcessingRequest:
    return ProcessingRequest(response_trailers=HttpTrailers(trailers=header_map({})))


# What goes back, read as values that print well.


def kinds(responses: Iterable[ProcessingResponse]) -> list[str]:
    return [str(response.WhichOneof("response")) for response in responses]


def chunks(responses: Iterable[ProcessingResponse]) -> list[tuple[bytes, bool]]:
    """Streamed chunks of either direction, with their end of stream."""
    found = []
    for response in responses:
        kind = response.WhichOneof("response")
        if kind in ("request_body", "response_body"):
            mutation = getattr(response, kind).response.body_mutation
            assert mutation.HasField("streamed_response"), response
            found.append((mutation.streamed_response.body, mutation.streamed_response.end_of_stream))
    return found


def headers_set(response: ProcessingResponse) -> dict[str, str]:
    kind = response.WhichOneof("response")
    mutation = response.immediate_response.headers
    if kind != "immediate_response":
        mutation = getattr(response, str(kind)).response.header_mutation
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}
