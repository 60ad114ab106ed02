"""Arms from policies: the product's own by name, anybody's from a policy file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from thunderagent_epp.feed.policy_file import PolicyFile, PolicyFileError, WorkerSpec, read_policy_file
from thunderagent_epp.feed.problems import problems
from thunderagent_epp.feed.yaml_lines import Document, YamlError
from thunderagent_epp.scheduling.policy import SPEC, AdmissionPolicy
from thunderagent_sim.fleet.arms import ROUTERS, Arm, Observed, ProgramAware
from thunderagent_sim.fleet.engine import Engine

POLICIES: Final = {
    "classic": AdmissionPolicy.from_parameters({"policy": "Classic"}),
    "rotation": AdmissionPolicy.from_parameters({"policy": "Rotation"}),
}
"""Admission policies as they come, by name."""


class ArmError(ValueError):
    """What stands after ``--arm`` cannot be run; its text is one line per fault."""


@dataclass(frozen=True, slots=True)
class NamedArm:
    """An arm as the command line names it; without a policy, one of the plain routers."""

    name: str
    policy: AdmissionPolicy | None = None
    ledger_share: float = 1.0
    announce_ends: bool = False

    def make(self, observe: Callable[[Observed], None]) -> Callable[[Sequence[Engine]], Arm]:
        """What `Fleet` makes the arm with; ``observe`` is told of its decisions about programs."""
        policy = self.policy
        if policy is None:
            return ROUTERS[self.name]
        return lambda engines: ProgramAware(
            engines,
            policy,
            ledger_share=self.ledger_share,
            announce_ends=self.announce_ends,
            observe=observe,
        )


class _PolicyAlone(PolicyFile):
    """A policy file whose workers, if it names any, are not looked at: the pods are simulated."""

    workers: list[WorkerSpec] = Field(default_factory=list)


def policy_of(text: str) -> AdmissionPolicy | None:
    """The policy of an arm: None for a plain router, else by name or from a file. Raises ArmError."""
    if text in ROUTERS:
        return None
    if text in POLICIES:
        return POLICIES[text]
    path = Path(text)
    if not path.exists():
        names = ", ".join([*ROUTERS, *POLICIES])
        raise ArmError(f"--arm: {text} is neither a policy file nor one of {names}")
    try:
        policy = _load(path)
    except PolicyFileError as error:
        raise ArmError(str(error)) from None
    if policy.max_hold_seconds is not None:
        raise ArmError(f"{path}: admission.maxHold: is not simulated, as a refused turn would have to be retried")
    return policy


def _load(path: Path) -> AdmissionPolicy:
    content = read_policy_file(path)
    try:
        document = Document(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise PolicyFileError(f"{path}: is not UTF-8 text") from None
    except YamlError as error:
        raise PolicyFileError(f"{path}:{error.line}: {error}") from None
    given = {} if document.value is None else document.value
    if not isinstance(given, dict):
        raise PolicyFileError(f"{path}:1: must be a mapping of fields: admission and, not looked at, the others")
    try:
        return _PolicyAlone.model_validate(given, by_alias=True, by_name=False, context=SPEC).admission
    except ValidationError as error:
        faults = [(document.line(fault.near or fault.path), fault) for fault in problems(error, _PolicyAlone, given)]
        lines = (f"{path}:{line}: {fault}" for line, fault in sorted(faults, key=lambda fault: fault[0]))
        raise PolicyFileError("\n".join(lines)) from None
