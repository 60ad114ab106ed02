"""Prefill on one worker, decode on another, as an llm-d sidecar and vLLM's KV connector do it between them.

A decode worker that is told of a prefill worker (``x-prefiller-host-port``) first sends it the same request for one
token, marked so that its KV cache is kept for another worker (``kv_transfer_params``), then answers with that cache
loaded. Where the prefill worker cannot be had, the decode worker computes the prompt itself. `worker.py` is the only
caller; what a loaded cache saves is the engine's matter.
"""

from __future__ import annotations

import contextlib
import uuid
from http import HTTPStatus
from typing import Final

import aiohttp
import msgspec

from thunderagent_sim.answers import Json

PREFILLER_HEADER: Final = "x-prefiller-host-port"

_LIMITS: Final = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""Where each API's requests say how long the answer may be."""

_FOR_ANOTHER: Final[Json] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


_SIDE_CHANNEL_PORT: Final = 5600
"""Where vLLM's NIXL connector is asked for a cache; nothing listens there, for nothing is really moved."""


class _Marker(msgspec.Struct):
    do_remote_decode: bool = False
    do_remote_prefill: bool = False


class _Marked(msgspec.Struct):
    kv_transfer_params: _Marker | None = None


def prefill_request(path: str, body: bytes) -> bytes:
    """The request for the prefill alone: the same prompt, one token, not streamed, its cache kept for another."""
    request = msgspec.json.decode(body, type=Json)
    request |= dict.fromkeys(_LIMITS[path], 1)
    request |= {"stream": False, "kv_transfer_params": _FOR_ANOTHER}
    request.pop("stream_options", None)
    return msgspec.json.encode(request)


def is_for_another(body: bytes) -> bool:
    """Whether a request is for the prefill alone."""
    with contextlib.suppress(msgspec.DecodeError):
        marker = msgspec.json.decode(body, type=_Marked).kv_transfer_params
        return marker is not None and marker.do_remote_decode
    return False


def kept_cache(engine_id: str, host: str, blocks: int) -> Json:
    """What a prefill worker says of the cache it keeps, for the worker that loads it."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_block_ids": [list(range(blocks))],
        "remote_host": host,
        "remote_port": _SIDE_CHANNEL_PORT,
    }


async def remote_prefill(client: aiohttp.ClientSession, prefiller: str, path: str, body: bytes) -> bool:
    """Have the worker at ``prefiller`` (``host:port``) do the prefill; whether its cache can be loaded now."""
    headers = {"content-type": "application/json", "x-request-id": str(uuid.uuid4())}
    try:
        async with client.post(
            f"http://{prefiller}{path}", data=prefill_request(path, body), headers=headers
        ) as answer:
            if answer.status != HTTPStatus.OK:
                return False
            marker = msgspec.json.decode(await answer.read(), type=_Marked).kv_transfer_params
            return marker is not None and marker.do_remote_prefill
    except (aiohttp.ClientError, msgspec.DecodeError, ValueError):
        return False
