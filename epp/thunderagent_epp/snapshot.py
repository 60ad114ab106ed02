"""The only thing that crosses from a feed to the picker: the policy in force and every worker, with an id."""

from __future__ import annotations

from dataclasses import dataclass, field

from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.scheduling.capacity import CapacitySnapshot
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.topology import Disaggregation


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Immutable and complete; a newer one has a greater ``id`` (architecture.md, *Snapshot*).

    ``disaggregation`` is None where each worker does both prefill and decode.
    """

    id: int
    capacity: CapacitySnapshot
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    requests: RequestPolicy = field(default_factory=RequestPolicy)
    disaggregation: Disaggregation | None = None
