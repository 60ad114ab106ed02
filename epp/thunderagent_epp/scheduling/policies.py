"""The one place that knows which rules an admission policy's name stands for."""

from __future__ import annotations

from typing import Any

from thunderagent_epp.scheduling.capacity import CapacitySnapshot
from thunderagent_epp.scheduling.classifier import Classifier
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.rotation import Rotation
from thunderagent_epp.scheduling.rules import AdmissionRules
from thunderagent_epp.scheduling.topology import Disaggregation, RetentionPool, decode_pool
from thunderagent_epp.scheduling.two_ledgers import TwoLedgers


def admission_rules(policy: AdmissionPolicy, snapshot: CapacitySnapshot | None = None) -> AdmissionRules[Any] | None:
    """The rules of a policy, without any program yet; None when admission is disabled."""
    match policy.policy:
        case "Disabled":
            return None
        case "Classic":
            return Classifier(policy, snapshot)
        case "Rotation":
            return Rotation(policy, snapshot)


def pooled_rules(
    policy: AdmissionPolicy, capacity: CapacitySnapshot, disaggregation: Disaggregation | None
) -> AdmissionRules[Any] | TwoLedgers | None:
    """The same over the pool whose capacity is the ledger's, or over both; over all workers without disaggregation."""
    if disaggregation is None:
        return admission_rules(policy, capacity)
    if disaggregation.retention_pool is RetentionPool.DECODE:
        return admission_rules(policy, decode_pool(capacity))
    prefill, decode = admission_rules(policy), admission_rules(policy)
    if prefill is None or decode is None:
        return None
    two = TwoLedgers(prefill, decode, retain_decode=disaggregation.retention_pool is RetentionPool.BOTH)
    two.snapshot(capacity)
    return two
