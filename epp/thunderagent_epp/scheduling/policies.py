"""The one place that knows which rules an admission policy's name stands for."""

from __future__ import annotations

from typing import Any

from thunderagent_epp.scheduling.capacity import CapacitySnapshot
from thunderagent_epp.scheduling.classifier import Classifier
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.rotation import Rotation
from thunderagent_epp.scheduling.rules import AdmissionRules


def admission_rules(policy: AdmissionPolicy, snapshot: CapacitySnapshot | None = None) -> AdmissionRules[Any] | None:
    """The rules of a policy, without any program yet; None when admission is disabled."""
    match policy.policy:
        case "Disabled":
            return None
        case "Classic":
            return Classifier(policy, snapshot)
        case "Rotation":
            return Rotation(policy, snapshot)
