"""The first leg of a disaggregated turn: which worker does the prefill, and how the decode worker learns of it.

The director asks once it has let a turn go and knows where it decodes, so a held turn touches no prefill worker. Under
the aggregated topology, and for what is no inference, there is no such leg and nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Collection

from thunderagent_epp.extproc.handoff import handoff_headers
from thunderagent_epp.extproc.turn import Placement
from thunderagent_epp.requests.inference import InferenceRequest
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, WorkerRank
from thunderagent_epp.scheduling.prefill import PrefillPool
from thunderagent_epp.scheduling.topology import Disaggregation, prefill_pool


class PrefillLeg:
    """Places prefills for the director, and keeps account of those that are not over."""

    def __init__(self) -> None:
        self._capacity = CapacitySnapshot()
        self._terms: Disaggregation | None = None
        self._pool = PrefillPool()

    def snapshot(self, capacity: CapacitySnapshot, terms: Disaggregation | None) -> None:
        """Take newer workers, and the terms of their topology; None: aggregated."""
        self._capacity = capacity
        self._terms = terms
        self._pool.snapshot(CapacitySnapshot() if terms is None else prefill_pool(capacity))

    def place(
        self,
        request_id: str,
        request: InferenceRequest,
        prompt_tokens: int,
        decode: WorkerRank,
        *,
        target: WorkerRank | None,
        subset: Collection[WorkerRank] | None,
    ) -> tuple[WorkerRank | None, Placement]:
        """The prefill worker of a request that decodes on ``decode``, and its placement with the headers for both.

        None: the decode worker does both, as it does when it is picked for the prefill itself.
        """
        to = self._capacity.by_id[decode]
        if self._terms is None or not request.inference:
            return None, Placement(to.endpoint)
        worker = self._pool.pick(request.session, decode, target=target, subset=subset)
        if worker is not None:
            self._pool.started(request_id, None if request.final else request.session, worker, prompt_tokens)
        if request.final and request.session is not None:
            self._pool.forget(request.session)
        other = None if worker is None or worker == decode else self._capacity.by_id[worker]
        return worker, Placement(to.endpoint, handoff_headers(self._terms.handoff, to, other))

    def over(self, request_id: str) -> None:
        """The answer has begun, or the request has ended."""
        self._pool.over(request_id)
