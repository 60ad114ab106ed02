"""One pod: vLLM's scheduler in outline, advanced by events instead of tokens.

Theory of operation
-------------------
An engine works in steps. A step computes one token for every decoding turn and spends what is left of its token
budget on prompts, first those already begun, then those at the front of the waiting queue, first come first served,
as long as their blocks can be had; the first in line that cannot have them blocks those behind it. How long a step
takes follows from a few sums (`service.py`). Decoding turns all move one token per step, so none is looked at: their
number, the sum of their contexts, the steps in which the next of them ends (a heap) and the steps in which some of
them need another block (a count for each remainder by the block size) are enough. A step costs the same whatever
runs; a *stretch* of steps without prefill is one event, cut short at the end of the step in which a turn arrives.

When decoding turns need blocks that are not there, the turn that was scheduled last loses its own and goes back to
the front of the queue; its context is computed again, as far as it is not found in the cache.

Who drives it: `submit` what arrives, `settle` once a moment's events are in, then `finish` at `next_event`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from math import ceil, inf, sqrt

from thunderagent_sim.fleet.cache import PrefixCache
from thunderagent_sim.fleet.service import Service
from thunderagent_sim.fleet.turns import Turn


class Engine:
    """One pod's scheduler and cache; ``slowness`` multiplies the time of every step."""

    def __init__(self, service: Service, slowness: float = 1.0) -> None:
        self.service = service
        self.cache = PrefixCache(service.usable_blocks, service.block_size)
        self.next_event = inf
        """When the present step or stretch ends; infinity while idle."""
        self.prefilled_tokens = 0
        """Prompt tokens computed so far, those computed again included."""
        self.preemptions = 0
        self._slowness = slowness
        self._generated = 0
        self._waiting: deque[Turn] = deque()
        self._blocked = False
        """Whether the first in the queue could not be scheduled, and cannot until a turn ends."""
        self._running: dict[Turn, None] = {}
        """In the order in which they were scheduled; the last is preempted first."""
        self._prefilling: list[Turn] = []
        self._step = 0
        self._decoding = 0
        self._contexts = 0
        """Context tokens of all decoding turns together."""
        self._finishing: list[tuple[int, int, Turn]] = []
        self._scheduled = 0
        self._crossings = [0] * service.block_size
        """How many decoding turns need another block in the steps of each remainder by the block size."""
        self._began = 0.0
        self._steps = 0
        """Steps of the present stretch; 0 while idle."""
        self._chunks: list[tuple[Turn, int]] = []

    @property
    def waiting(self) -> int:
        """Turns that are not scheduled yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Turns that are scheduled."""
        return len(self._running)

    @property
    def usage(self) -> float:
        """Share of the blocks that running turns hold."""
        return self.cache.pinned / self.cache.blocks

    def turns(self) -> Iterator[Turn]:
        """Every turn that is here, the running ones first."""
        yield from self._running
        yield from self._waiting

    def generated(self, now: float) -> int:
        """Tokens generated until ``now``, in whole steps."""
        return self._generated + self._decoding * self._steps_until(now)

    def generated_of(self, turn: Turn, now: float) -> int:
        """Tokens of one running turn's answer until ``now``, in whole steps."""
        if turn.finish_step < 0:
            return turn.generated
        return turn.generated + self._step + self._steps_until(now) - turn.decode_start

    def submit(self, turn: Turn) -> None:
        """Queue a turn; `settle` must follow."""
        self._waiting.append(turn)

    def settle(self, now: float) -> None:
        """See what was submitted: begin a step if none is under way, end a stretch early if it is one."""
        if not self._steps:
            self._begin(now)
        elif self._steps > 1 and self._waiting and not self._blocked:
            taken = self._steps_until(now)
            if self._began + self._duration(taken) < now or not taken:
                taken += 1
            if taken < self._steps:
                self._steps = taken
                self.next_event = self._began + self._duration(taken)

    def finish(self) -> tuple[list[Turn], list[Turn]]:
        """End the step or stretch at `next_event`: the turns that got their first token, and those that ended.

        A turn may be among both. `settle` must follow, once what they cause has been submitted.
        """
        now, steps = self.next_event, self._steps
        self._steps = 0
        self.next_event = inf
        self._take_steps(steps)
        first: list[Turn] = []
        ended: list[Turn] = []
        for turn, chunk in self._chunks:
            turn.prefill_position += chunk
            self.prefilled_tokens += chunk
            if turn.prefill_position == turn.prefill_end:
                self._begin_decoding(turn)
                if turn.first_token is None:
                    turn.first_token = now
                    first.append(turn)
        self._chunks.clear()
        while self._finishing and self._finishing[0][0] <= self._step:
            step, _, turn = heappop(self._finishing)
            if turn.finish_step == step:
                self._end(turn)
                ended.append(turn)
        return first, ended

    def fail(self) -> list[Turn]:
        """Lose the cache and every turn; those that were here are returned, as before they were sent."""
        lost = list(self.turns())
        for turn in lost:
            turn.generated = 0
            turn.lease = None
            turn.cached_tokens = None
            turn.finish_step = -1
        self._waiting.clear()
        self._running.clear()
        self._prefilling.clear()
        self._finishing.clear()
        self._chunks.clear()
        self._crossings = [0] * self.service.block_size
        self._decoding = self._contexts = self._steps = 0
        self.next_event = inf
        self.cache.clear()
        return lost

    # -- the step under way ----------------------------------------------------------------------------------------

    def _duration(self, steps: int) -> float:
        """Seconds of ``steps`` steps of the present stretch, without prefill."""
        service, decoding = self.service, self._decoding
        one = (
            service.step_seconds
            + service.decode_sequence_seconds * decoding
            + service.decode_context_seconds * self._contexts
        )
        growing = service.decode_context_seconds * decoding * (steps * (steps - 1) // 2)
        return (steps * one + growing) * self._slowness

    def _steps_until(self, now: float) -> int:
        """Whole steps of the present stretch that are over at ``now``."""
        if self._steps <= 1:
            return 0
        if now >= self.next_event:
            return self._steps
        service, decoding = self.service, self._decoding
        growth = service.decode_context_seconds * decoding
        one = service.step_seconds + service.decode_sequence_seconds * decoding
        one += service.decode_context_seconds * self._contexts - growth / 2
        seconds = (now - self._began) / self._slowness
        guess = seconds / one if one > 0 else 0.0
        if growth > 0:
            guess = (sqrt(one * one + 2 * growth * seconds) - one) / growth
        steps = max(0, min(int(guess) + 1, self._steps))
        while steps and self._began + self._duration(steps) > now:
            steps -= 1
        return steps

    def _begin(self, now: float) -> None:
        """Schedule the next step, or the stretch of steps until something can change."""
        preemptions = self.preemptions
        needed = self._crossings[(self._step + 1) % self.service.block_size]
        while needed and not self.cache.extend(needed):
            self._preempt()
            needed = self._crossings[(self._step + 1) % self.service.block_size]
        # Like vLLM, take nobody in where somebody was just sent away.
        self._schedule_prefill(from_queue=self.preemptions == preemptions)
        service = self.service
        self._began = now
        if self._chunks:
            tokens = weighted = 0
            for turn, chunk in self._chunks:
                tokens += chunk
                weighted += chunk * (2 * turn.prefill_position + chunk)
            seconds = service.prefill_token_seconds * tokens + service.attention_seconds * (weighted / 2)
            self._steps = 1
            self.next_event = now + self._duration(1) + seconds * self._slowness
        elif self._decoding:
            self._steps = self._stretch()
            self.next_event = now + self._duration(self._steps)
        else:
            self._steps = 0
            self.next_event = inf
            assert not self._waiting, "nothing runs, so whatever waits fits"

    def _stretch(self) -> int:
        """How many steps can be taken before a turn ends or blocks run out; the first one's blocks are taken."""
        while self._finishing[0][2].finish_step != self._finishing[0][0]:
            heappop(self._finishing)  # was preempted
        steps = self._finishing[0][0] - self._step
        spare = self.cache.blocks - self.cache.pinned
        if (ceil(steps / self.service.block_size) + 1) * self._decoding <= spare:
            return steps
        taken, slot = 1, self._step + 2
        while taken < steps and (needed := self._crossings[slot % self.service.block_size]) <= spare:
            spare -= needed
            slot += 1
            taken += 1
        return taken

    def _take_steps(self, steps: int) -> None:
        """Every decoding turn is ``steps`` tokens longer. The first step's blocks were taken when it began."""
        decoding, size = self._decoding, self.service.block_size
        if decoding:
            self._generated += decoding * steps
            self._contexts += decoding * steps
            rounds, rest = divmod(steps - 1, size)
            needed = rounds * decoding
            for slot in range(self._step + 2, self._step + 2 + rest):
                needed += self._crossings[slot % size]
            if needed:
                taken = self.cache.extend(needed)
                assert taken, "the stretch was cut where blocks run out"
        self._step += steps

    # -- turns -----------------------------------------------------------------------------------------------------

    def _schedule_prefill(self, *, from_queue: bool) -> None:
        budget = self.service.max_batched_tokens - self._decoding
        for turn in self._prefilling:
            if budget <= 0:
                return
            chunk = min(budget, turn.prefill_end - turn.prefill_position)
            self._chunks.append((turn, chunk))
            budget -= chunk
        self._blocked = False
        while from_queue and budget > 0 and self._waiting:
            self._blocked = True
            if len(self._running) >= self.service.max_num_seqs:
                return
            turn = self._waiting[0]
            tokens = turn.plan.prompt_tokens + turn.generated
            shared = turn.plan.shared_tokens
            if turn.preemptions and not turn.plan.overlaps:
                shared = tokens
            lease = self.cache.lease(turn.session, shared, tokens)
            if lease is None:
                return
            self._blocked = False
            self._waiting.popleft()
            self._running[turn] = None
            turn.lease = lease
            hit = lease.depth * self.service.block_size
            if turn.cached_tokens is None:
                turn.cached_tokens = hit
            turn.prefill_position = hit
            turn.prefill_end = tokens
            chunk = min(budget, tokens - hit)
            self._prefilling.append(turn)
            self._chunks.append((turn, chunk))
            budget -= chunk

    def _begin_decoding(self, turn: Turn) -> None:
        """The prompt is computed, and with it the first token of the answer, or the next one after a preemption."""
        assert turn.lease is not None
        self._prefilling.remove(turn)
        if not turn.plan.overlaps:
            self.cache.publish(turn.lease, turn.prefill_end)
        turn.generated += 1
        self._generated += 1
        turn.decode_start = self._step
        turn.decode_tokens = turn.prefill_end
        turn.finish_step = self._step + turn.plan.output_tokens - turn.generated
        self._scheduled += 1
        heappush(self._finishing, (turn.finish_step, self._scheduled, turn))
        self._decoding += 1
        self._contexts += turn.decode_tokens
        self._crossings[(self._step + 1 - turn.decode_tokens) % self.service.block_size] += 1

    def _stop_decoding(self, turn: Turn) -> int:
        """Take a turn out of the decoding ones; the tokens it holds in the cache are returned."""
        done = self._step - turn.decode_start
        self._decoding -= 1
        self._contexts -= turn.decode_tokens + done
        self._crossings[(turn.decode_start + 1 - turn.decode_tokens) % self.service.block_size] -= 1
        turn.generated += done
        turn.finish_step = -1
        return turn.decode_tokens + done

    def _end(self, turn: Turn) -> None:
        assert turn.lease is not None
        held = self._stop_decoding(turn)
        del self._running[turn]
        self.cache.release(turn.lease, held, held, seen_again=not turn.plan.overlaps)
        turn.lease = None

    def _preempt(self) -> None:
        """Put the turn that was scheduled last back to the front of the queue."""
        turn = next(reversed(self._running))
        assert turn.lease is not None
        del self._running[turn]
        if turn.finish_step >= 0:
            held = computed = self._stop_decoding(turn)
        else:
            held, computed = turn.prefill_end, turn.prefill_position
            self._prefilling.remove(turn)
        self.cache.release(turn.lease, held, computed, seen_again=not turn.plan.overlaps)
        turn.lease = None
        turn.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(turn)
