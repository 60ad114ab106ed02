"""What stands in for a tokenizer and a model: text to tokens, tokens to block keys, and an answer of filler words.

A token is four bytes, and a sequence of tokens is simply ``bytes``: four bytes of UTF-8 text, zero-padded at the end
of each piece, or a mark that no text contains. Each message is cut into tokens on its own. An answer consists of
words of exactly four bytes, so that an answer sent back in the next turn's messages becomes the very tokens that
were generated: a conversation that only grows extends its last turn's tokens, generated ones included, and finds
them all in the cache. (A raw completion prompt has no messages; continued text keeps its blocks only as far as the
earlier prompt was whole tokens.)
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final

TOKEN_BYTES: Final = 4

_MESSAGE_START: Final = b"\xff\xff\xff\x01"
_MESSAGE_END: Final = b"\xff\xff\xff\x02"

_THREE_LETTER_WORDS: Final = (
    "the run saw two new red big old cat dog map key box log bus web net app bug fix job row col set get put add cut "
    "and but for not now out off via per all any few one six ten use try see ask say hit win let may can was had its"
)
_RING_TOKENS: Final = 4093


def pack(text: str) -> bytes:
    """Cut one piece of text into tokens; lone surrogates, which JSON can carry, count as one character."""
    encoded = text.encode("utf-8", "replace")
    return encoded + bytes(-len(encoded) % TOKEN_BYTES)


def message(role: str, content: bytes) -> bytes:
    """One message of a chat prompt; ``content`` is tokens already."""
    return _MESSAGE_START + pack(role) + content + _MESSAGE_END


def chat_prompt(messages: Iterable[bytes]) -> bytes:
    """A whole chat prompt, ending where the assistant's answer begins."""
    return b"".join(messages) + _MESSAGE_START + pack("assistant")


def count(tokens: bytes | bytearray) -> int:
    """Number of tokens."""
    return len(tokens) // TOKEN_BYTES


def chain_keys(keys: list[int], tokens: bytes | bytearray, block_size: int) -> None:
    """Append to ``keys`` the key of every full block of ``tokens`` that has none yet.

    A key covers its block and, through the key before it, all tokens up to there. Keys mean nothing in another
    process.
    """
    block_bytes = block_size * TOKEN_BYTES
    parent = keys[-1] if keys else 0
    for start in range(len(keys) * block_bytes, len(tokens) - block_bytes + 1, block_bytes):
        parent = hash((parent, bytes(tokens[start : start + block_bytes])))
        keys.append(parent)


def answer_seed(prompt: bytes) -> int:
    """Where in the filler the answer to ``prompt`` starts: different prompts get different answers."""
    return zlib.crc32(prompt) % _RING_TOKENS


def answer(seed: int, start: int, stop: int, length: int) -> bytes:
    """Tokens ``start`` to ``stop`` of an answer of ``length`` tokens; the last one ends the sentence.

    It neither starts nor ends with a space, so that a client that strips it sends the same tokens back.
    """
    offset = (seed + start) % _RING_TOKENS
    tokens = _ring(offset, stop - start)
    if stop == length:
        return tokens[:-1] + b"."
    return tokens


def _ring(offset: int, tokens: int) -> bytes:
    whole_rings = (offset + tokens) // _RING_TOKENS + 1
    filler = _FILLER if whole_rings == 1 else _FILLER * whole_rings
    return filler[offset * TOKEN_BYTES : (offset + tokens) * TOKEN_BYTES]


def _make_filler() -> bytes:
    words = _THREE_LETTER_WORDS.split()
    picks = (zlib.crc32(number.to_bytes(2, "big")) % len(words) for number in range(_RING_TOKENS))
    return b"".join(f"{words[pick]} ".encode() for pick in picks)


_FILLER: Final = _make_filler()
