"""Reading and building ext_proc messages: the only place that knows their fields.

The exchange decides which message is due, this module says what is in it. Messages are filled in place: passing
nested ones to a constructor copies them at each level and costs four times as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)

from thunderagent_epp.extproc.errors import RefusalAnswer
from thunderagent_epp.extproc.handoff import HANDOFF_HEADERS

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Request header, and key of the dynamic metadata, that name the chosen endpoint to the proxy."""

DESTINATION_NAMESPACE: Final = "envoy.lb"

SERVED: Final = "x-gateway-destination-endpoint-served"
"""Key in `DESTINATION_NAMESPACE` by which the proxy says which endpoint really served."""

OWN_HEADERS: Final = (
    "x-thunderagent-session-id",
    "x-thunderagent-parent-session-id",
    "x-thunderagent-session-final",
)
"""Request headers that only the picker understands; no worker gets to see them."""

CHUNK_BYTES: Final = 62_000
"""Most bytes of one request-body chunk: some proxies take no more than 64 KiB a message (extproc.md)."""

# Shared by all streams and never changed: most answers say no more than "go on".
REQUEST_HEADERS_GO_ON: Final = ProcessingResponse(request_headers=HeadersResponse())
REQUEST_BODY_GOES_ON: Final = ProcessingResponse(request_body=BodyResponse())
REQUEST_TRAILERS_GO_ON: Final = ProcessingResponse(request_trailers=TrailersResponse())
RESPONSE_HEADERS_GO_ON: Final = ProcessingResponse(response_headers=HeadersResponse())
RESPONSE_BODY_GOES_ON: Final = ProcessingResponse(response_body=BodyResponse())
RESPONSE_TRAILERS_GO_ON: Final = ProcessingResponse(response_trailers=TrailersResponse())


def header_pairs(message: HttpHeaders) -> Iterator[tuple[str, str]]:
    """Yield names and values in order; a value is in ``raw_value``, else in ``value``.

    Bytes that are no UTF-8 come as lone surrogates (``surrogateescape``).
    """
    for header in message.headers.headers:
        raw = header.raw_value
        # Values of other encodings must stay apart: as identities they are refused, and replacing makes them one.
        yield header.key, raw.decode("utf-8", "surrogateescape") if raw else header.value


def served_endpoint(message: ProcessingRequest) -> str | None:
    """Return the endpoint that really served, as the metadata of the response headers says; None without."""
    # Looking up a missing key in a protobuf map would create it.
    if not has_balancer_metadata(message):
        return None
    fields = message.metadata_context.filter_metadata[DESTINATION_NAMESPACE].fields
    return (fields[SERVED].string_value.strip() or None) if SERVED in fields else None


def has_balancer_metadata(message: ProcessingRequest) -> bool:
    """Whether the proxy sent anything of the namespace in which it says who served."""
    return message.HasField("metadata_context") and DESTINATION_NAMESPACE in message.metadata_context.filter_metadata


def destination(endpoint: str, set_headers: Mapping[str, str]) -> ProcessingResponse:
    """Answer the request headers: send it to ``endpoint`` (``ip:port`` or ``[v6]:port``) with ``set_headers``."""
    if not set_headers:
        return _plain_destination(endpoint)
    response = ProcessingResponse()
    _direct(response, response.request_headers.response, endpoint, set_headers)
    return response


def buffered_destination(endpoint: str, set_headers: Mapping[str, str], body: bytes | None) -> ProcessingResponse:
    """Answer a buffered request body: as `destination`, and ``body`` instead of what came unless it is None."""
    response = ProcessingResponse()
    common = response.request_body.response
    if body is not None:
        common.body_mutation.body = body
        # Envoy takes a buffered body of another length only together with its length.
        set_headers = {**set_headers, "content-length": str(len(body))}
    _direct(response, common, endpoint, set_headers)
    return response


def response_headers(set_headers: Mapping[str, str]) -> ProcessingResponse:
    """Answer the response headers: pass them on with ``set_headers``."""
    response = ProcessingResponse()
    _set_headers(response.response_headers.response.header_mutation, set_headers)
    return response


def duplex_request_body(body: bytes, end_of_stream: bool) -> Iterator[ProcessingResponse]:
    """Yield a whole request body in chunks; an empty one is one empty chunk."""
    last = max(0, len(body) - 1) // CHUNK_BYTES
    for index in range(last + 1):
        response = ProcessingResponse()
        chunk = response.request_body.response.body_mutation.streamed_response
        chunk.body = body[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        chunk.end_of_stream = end_of_stream and index == last
        yield response


def streamed_request_body(chunks: int, body: bytes | None) -> Iterator[ProcessingResponse]:
    """Yield one answer to each of ``chunks`` streamed chunks, which together turn into ``body`` unless it is None."""
    for index in range(chunks):
        if body is None:
            yield REQUEST_BODY_GOES_ON
            continue
        response = ProcessingResponse()
        # All of it in the last chunk: that one alone carries the end of the stream.
        if index == chunks - 1:
            response.request_body.response.body_mutation.body = body
        else:
            response.request_body.response.body_mutation.clear_body = True
        yield response


def duplex_response_body(body: HttpBody) -> ProcessingResponse:
    """Echo one response chunk unchanged, with its own end of stream."""
    response = ProcessingResponse()
    chunk = response.response_body.response.body_mutation.streamed_response
    chunk.body = body.body
    chunk.end_of_stream = body.end_of_stream
    return response


def immediate(answer: RefusalAnswer, details: str) -> ProcessingResponse:
    """Answer in the worker's place; ``details`` (no spaces) is what the proxy's access log says about it."""
    response = ProcessingResponse()
    refusal = response.immediate_response
    refusal.status.code = answer.status
    refusal.body = answer.body
    refusal.details = details
    _set_headers(refusal.headers, answer.headers)
    return response


@lru_cache(maxsize=1024)
def _plain_destination(endpoint: str) -> ProcessingResponse:
    response = ProcessingResponse()
    _direct(response, response.request_headers.response, endpoint, {})
    return response


def _direct(
    response: ProcessingResponse,
    common: CommonResponse,
    endpoint: str,
    set_headers: Mapping[str, str],
) -> None:
    common.clear_route_cache = True
    _set_headers(common.header_mutation, {DESTINATION: endpoint, **set_headers})
    common.header_mutation.remove_headers.extend(OWN_HEADERS)
    # A header that is set is overwritten, and a proxy may remove after it sets.
    common.header_mutation.remove_headers.extend(name for name in HANDOFF_HEADERS if name not in set_headers)
    fields = response.dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value.fields
    fields[DESTINATION].string_value = endpoint


def _set_headers(mutation: HeaderMutation, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add()
        option.header.key = name
        option.header.raw_value = value.encode()
        option.append_action = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
