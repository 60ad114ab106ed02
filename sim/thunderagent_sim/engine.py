"""One simulated inference engine: continuous batching in outline, as a state machine driven by the time.

`EngineLoop` calls `submit`, `abort` and `advance` with the time; nothing here waits or reads a clock, and results
do not depend on how often `advance` is called, except that what frees room is noticed then.

* A sequence waits, first come first served, until it is among the ``max_num_seqs`` running and all blocks of its
  prompt fit. One waiting sequence that does not fit holds up those behind it.
* Prefill is one lane: sequences are computed one after the other at ``prefill_tokens_per_second``, only the tokens
  that are not in the cache, and at least one. The end of a prefill is the first token.
* Of a sequence whose cache another worker computed (``transferred``) only the last token of the prompt is computed.
* Then each sequence decodes at ``decode_tokens_per_second``, all at once and undisturbed by prefill.
* A decode that finds no block preempts the youngest running sequence, which goes back to the head of the queue and
  is computed again, as far as its blocks have been evicted meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from thunderagent_sim import tokens
from thunderagent_sim.kv_cache import BlockTable, KVCache

FinishReason = Literal["stop", "length"]

# Guards against the last bit of (time × rate): a token due at this very moment must count.
_TOKEN_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Size and speed of an engine. ``blocks`` of ``block_size`` tokens; rates are tokens per second, > 0.

    ``max_model_len`` bounds prompt and answer of one request together; None: what the cache holds.
    Raises ValueError naming the option that is out of range.
    """

    blocks: int
    block_size: int = 16
    prefill_tokens_per_second: float = 8000.0
    decode_tokens_per_second: float = 50.0
    max_num_seqs: int = 256
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("blocks", "block_size", "prefill_tokens_per_second", "decode_tokens_per_second", "max_num_seqs"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be greater than 0, not {value}")
        if self.max_model_len is not None and not 0 < self.max_model_len <= self.capacity_tokens:
            raise ValueError(
                f"max_model_len must be between 1 and the {self.capacity_tokens} tokens the cache holds,"
                f" not {self.max_model_len}"
            )

    @property
    def capacity_tokens(self) -> int:
        """Tokens the KV cache holds."""
        return self.blocks * self.block_size

    @property
    def context_limit_tokens(self) -> int:
        """Longest prompt plus answer of one request."""
        return self.max_model_len or self.capacity_tokens


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One request in the engine; others only read it. Times are the engine's, in seconds.

    ``context`` holds the prompt's tokens and those generated so far. ``cached_tokens`` is how many of the prompt need
    not be computed when it is first admitted: found in the cache, or transferred. ``finish_reason`` is what will be
    said when it finishes.
    """

    context: bytearray
    prompt_tokens: int
    max_tokens: int
    finish_reason: FinishReason
    arrived_at: float
    answer_seed: int
    state: SequenceState = SequenceState.WAITING
    generated_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    """Of the prompt, those whose cache comes from another worker; lost in a preemption."""
    first_token_at: float | None = None
    finished_at: float | None = None
    keys: list[int] = field(default_factory=list)
    table: BlockTable[int] | None = None
    admitted_at: float | None = None
    prefill_began_at: float | None = None
    decode_origin: float = 0.0
    """When the first token would have come, had this sequence never been preempted."""

    @property
    def answer(self) -> bytes:
        """What has been generated so far, as text in UTF-8."""
        return bytes(self.context[self.prompt_tokens * tokens.TOKEN_BYTES :])


@dataclass(slots=True)
class EngineCounters:
    """What has happened since the engine started; all only grow. Tokens, except where the name says otherwise.

    A preempted sequence counts once in prompt, query and hit tokens, as in vLLM's metrics.
    """

    prompt: int = 0
    generation: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    """Of prompts for which another worker was asked."""
    external_hits: int = 0
    """Of these, what came from it and was not in the cache anyway."""
    preemptions: int = 0
    finished_requests: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})


class Engine:
    """See the module's docstring. Single-threaded; ``now`` never goes backwards."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.cache: KVCache[int] = KVCache(options.blocks)
        self.counters = EngineCounters()
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, None] = {}
        self._prefilling: deque[Sequence] = deque()
        self._prefill_free_at = -math.inf

    @property
    def running(self) -> int:
        """Sequences being prefilled or decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for blocks or a place in the batch."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """True when there is nothing to advance."""
        return not self._running and not self._waiting

    def submit(
        self,
        prompt: bytes,
        max_tokens: int,
        finish_reason: FinishReason,
        now: float,
        *,
        transferred: bool | None = None,
    ) -> Sequence:
        """Take a request of at least one token of ``prompt`` and answer it with ``max_tokens`` ≥ 1 tokens.

        ``transferred``: whether the prompt's cache comes from another worker; None: no other was asked for it.

        Raises ValueError when both together exceed the context limit: such a sequence could never run.
        """
        prompt_tokens = tokens.count(prompt)
        if prompt_tokens < 1 or max_tokens < 1:
            raise ValueError("a sequence has at least one token of prompt and one of answer")
        if prompt_tokens + max_tokens > self.options.context_limit_tokens:
            raise ValueError(f"{prompt_tokens} + {max_tokens} tokens exceed {self.options.context_limit_tokens}")
        sequence = Sequence(
            context=bytearray(prompt),
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            finish_reason=finish_reason,
            arrived_at=now,
            answer_seed=tokens.answer_seed(prompt),
            transferred_tokens=prompt_tokens - 1 if transferred else 0,
        )
        if transferred is not None:
            self.counters.external_queries += prompt_tokens
        tokens.chain_keys(sequence.keys, sequence.context, self.options.block_size)
        self._waiting.append(sequence)
        self._admit(now)
        return sequence

    def abort(self, sequence: Sequence, now: float) -> None:
        """Drop a sequence wherever it is and free its blocks; no effect on one that has ended."""
        if sequence.state in (SequenceState.FINISHED, SequenceState.ABORTED):
            return
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        else:
            self._stop_running(sequence, now)
        sequence.state = SequenceState.ABORTED
        self.counters.finished_requests["abort"] += 1

    def advance(self, now: float) -> list[Sequence]:
        """Do all work due until ``now``; return the sequences that have new tokens, oldest first."""
        self._prefill(now)
        progressed = [
            sequence
            for sequence in list(self._running)
            # An older sequence's growth may have preempted this one since the list was made.
            if sequence.state is SequenceState.DECODE and self._decode(sequence, now)
        ]
        self._admit(now)
        return progressed

    def _admit(self, now: float) -> None:
        while self._waiting and len(self._running) < self.options.max_num_seqs:
            sequence = self._waiting[0]
            context_tokens = tokens.count(sequence.context)
            block_size = self.options.block_size
            # The last token is always computed, for its output is what is wanted.
            reusable = sequence.keys[: (context_tokens - 1) // block_size]
            table = self.cache.allocate(reusable, -(-context_tokens // block_size))
            if table is None:
                return
            self._waiting.popleft()
            self._running[sequence] = None
            self._prefilling.append(sequence)
            sequence.state = SequenceState.PREFILL
            sequence.table = table
            if sequence.admitted_at is None:
                found_tokens = table.reused * block_size
                sequence.cached_tokens = max(found_tokens, sequence.transferred_tokens)
                self.counters.prefix_queries += sequence.prompt_tokens
                self.counters.prefix_hits += found_tokens
                self.counters.external_hits += sequence.cached_tokens - found_tokens
            sequence.admitted_at = now
            sequence.prefill_began_at = None

    def _prefill(self, now: float) -> None:
        while self._prefilling:
            sequence = self._prefilling[0]
            assert sequence.table is not None
            assert sequence.admitted_at is not None
            if sequence.prefill_began_at is None:
                sequence.prefill_began_at = max(self._prefill_free_at, sequence.admitted_at)
            context_tokens = tokens.count(sequence.context)
            there_tokens = max(sequence.table.reused * self.options.block_size, sequence.transferred_tokens)
            rate = self.options.prefill_tokens_per_second
            done_at = sequence.prefill_began_at + (context_tokens - there_tokens) / rate
            if done_at > now:
                computed = there_tokens + int(max(now - sequence.prefill_began_at, 0.0) * rate)
                self._commit(sequence, computed)
                return
            self._prefilling.popleft()
            self._prefill_free_at = done_at
            self._commit(sequence, context_tokens)
            sequence.state = SequenceState.DECODE
            sequence.decode_origin = done_at - sequence.generated_tokens / self.options.decode_tokens_per_second
            if sequence.first_token_at is None:
                sequence.first_token_at = done_at
                self.counters.prompt += sequence.prompt_tokens

    def _decode(self, sequence: Sequence, now: float) -> bool:
        rate = self.options.decode_tokens_per_second
        due = 1 + math.floor((now - sequence.decode_origin) * rate + _TOKEN_EPSILON)
        due = min(due, sequence.max_tokens)
        if due <= sequence.generated_tokens:
            return False
        # The newest token is not in the cache: it is computed when the next one is asked for.
        computed_tokens = sequence.prompt_tokens + due - 1
        assert sequence.table is not None
        while not self.cache.grow(sequence.table, -(-computed_tokens // self.options.block_size)):
            youngest = next(reversed(self._running))
            self._preempt(youngest, now)
            if youngest is sequence:
                return False
        sequence.context += tokens.answer(
            sequence.answer_seed, sequence.generated_tokens, due, length=sequence.max_tokens
        )
        self.counters.generation += due - sequence.generated_tokens
        sequence.generated_tokens = due
        tokens.chain_keys(sequence.keys, sequence.context, self.options.block_size)
        self._commit(sequence, computed_tokens)
        if due == sequence.max_tokens:
            self._stop_running(sequence, now)
            sequence.state = SequenceState.FINISHED
            sequence.finished_at = sequence.decode_origin + (due - 1) / rate
            self.counters.finished_requests[sequence.finish_reason] += 1
        return True

    def _commit(self, sequence: Sequence, computed_tokens: int) -> None:
        assert sequence.table is not None
        self.cache.commit(sequence.table, sequence.keys, computed_tokens // self.options.block_size)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self._stop_running(sequence, now)
        sequence.state = SequenceState.WAITING
        sequence.transferred_tokens = 0
        self._waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _stop_running(self, sequence: Sequence, now: float) -> None:
        if sequence.state is SequenceState.PREFILL:
            self._prefilling.remove(sequence)
            if sequence.prefill_began_at is not None:
                self._prefill_free_at = max(sequence.prefill_began_at, now)
        del self._running[sequence]
        assert sequence.table is not None
        self.cache.release(sequence.table)
        sequence.table = None
