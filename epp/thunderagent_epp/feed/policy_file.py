"""The policy file: what `thunderagent epp` and `standalone` read without Kubernetes (kubernetes.md, *Feed*).

It holds the fields of a ThunderAgentPolicy's spec, except that ``workers`` is the list of workers itself. A file is
accepted whole or refused whole, with every fault on one line that names the file, its line and the field.
"""

from __future__ import annotations

import re
import stat
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from thunderagent_epp.feed.problems import Problem, problems
from thunderagent_epp.feed.spec import (
    STRICT_SPEC,
    CapacityTokens,
    DisaggregationTerms,
    Engine,
    MetricsSpec,
    Port,
    RequestsSpec,
    SelectionSpec,
)
from thunderagent_epp.feed.yaml_lines import Document, YamlError
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Role, Worker, WorkerRank
from thunderagent_epp.scheduling.policy import SPEC, AdmissionPolicy, Seconds
from thunderagent_epp.snapshot import Snapshot

FILE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Four times what a ConfigMap holds; protects from a path that names something else altogether."""

WORKER_NAME_PATTERN: Final = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$"
"""A pod's name, capitals and underscores allowed; no slash, which parts name and rank."""


class PolicyFileError(Exception):
    """A policy file that cannot be used; its text is one line per fault, each naming the file."""


def _name(name: str) -> str:
    if not re.fullmatch(WORKER_NAME_PATTERN, name):
        raise ValueError(f"must be letters, digits, '-', '_' and '.', at most 253, not {name[:40]!r}")
    return name


def _address(text: str) -> str:
    try:
        address = ip_address(text)
    except ValueError:
        # Envoy's ORIGINAL_DST cluster, which takes the destination from the picker, resolves no names.
        raise ValueError(f"must be an IP address, not {text!r}; host names are not resolved") from None
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        raise ValueError(f"must be an IP address without a zone, not {text!r}")
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"must be the address of one worker, not {text!r}")
    return str(address)


def _ports(ports: list[int]) -> list[int]:
    twice = next((port for index, port in enumerate(ports) if port in ports[:index]), None)
    if twice is not None:
        raise ValueError(f"{twice} is there twice; each port is a rank of its own")
    return ports


class WorkerSpec(BaseModel):
    """One worker; each of its ports is one data-parallel rank, in order.

    How it is probed (``engine``, ``metrics``, ``probeInterval``) matters to ``thunderagent standalone`` alone; the
    picker by itself probes nothing and takes the same file.
    """

    model_config = STRICT_SPEC

    name: Annotated[str, AfterValidator(_name)] = Field(description="Unique among the workers.")
    address: Annotated[str, AfterValidator(_address)] = Field(description="IPv4 or IPv6 address.")
    ports: Annotated[list[Port], Field(min_length=1, max_length=8), AfterValidator(_ports)] = Field(
        description="One port per data-parallel rank."
    )
    capacity_tokens: CapacityTokens | None = Field(
        None, alias="capacityTokens", description="Tokens the KV cache of each rank holds; left out: unknown."
    )
    role: Literal["prefill", "decode", "prefill-decode"] | None = Field(
        None, description="What it does with topology Disaggregated; left out: decode."
    )
    block_size: Annotated[int, Field(ge=1, le=65536)] = Field(
        16, alias="blockSize", description="Tokens of a KV cache block, used where the worker does not say."
    )
    engine: Engine = Field(
        "auto", description="What serves the model; auto goes by its metrics, none is never asked for its capacity."
    )
    metrics: MetricsSpec = Field(default_factory=MetricsSpec, description="Where the metrics are read.")
    probe_interval_seconds: Seconds = Field(10.0, alias="probeInterval", description="Time between two probes.")

    @property
    def host(self) -> str:
        """The address as it stands before a port: in brackets if it is a v6 one."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def endpoints(self) -> list[str]:
        """``ip:port`` or ``[v6]:port`` of each rank."""
        return [f"{self.host}:{port}" for port in self.ports]


class PolicyFile(BaseModel):
    """A whole policy file. Validate by alias with ``context=SPEC``; `load_policy_file` does, and checks for clashes."""

    model_config = STRICT_SPEC

    admission: AdmissionPolicy = Field(default_factory=AdmissionPolicy)
    selection: SelectionSpec = Field(default_factory=SelectionSpec)
    requests: RequestsSpec = Field(default_factory=RequestsSpec)
    topology: Literal["Aggregated", "Disaggregated"] = "Aggregated"
    disaggregation: DisaggregationTerms | None = None
    workers: Annotated[list[WorkerSpec], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _without_empty_sections(cls, given: Any) -> Any:
        """A section whose every line is commented out is one that was left out."""
        if not isinstance(given, dict):
            return given
        return {name: section for name, section in given.items() if section is not None or name == "workers"}

    @property
    def disaggregated(self) -> bool:
        """Whether prefill and decode run on workers of their own."""
        return self.topology == "Disaggregated"

    def snapshot(self, snapshot_id: int) -> Snapshot:
        """What the file says as a snapshot. A rank's incarnation is its endpoint: another address, another cache."""
        return Snapshot(
            id=snapshot_id,
            capacity=CapacitySnapshot(
                tuple(
                    Worker(
                        id=WorkerRank(worker.name, rank),
                        endpoint=endpoint,
                        capacity_tokens=worker.capacity_tokens,
                        role=Role(worker.role or Role.DECODE) if self.disaggregated else Role.BOTH,
                        incarnation=endpoint,
                        block_size=worker.block_size,
                    )
                    for worker in self.workers
                    for rank, endpoint in enumerate(worker.endpoints())
                )
            ),
            admission=self.admission,
            requests=self.requests.policy(),
            disaggregation=(self.disaggregation or DisaggregationTerms()).terms() if self.disaggregated else None,
        )


def load_policy_file(path: Path) -> PolicyFile:
    """Read and check a policy file. Raises PolicyFileError."""
    return parse_policy_file(read_policy_file(path), str(path))


def read_policy_file(path: Path) -> bytes:
    """The bytes of a policy file. Raises PolicyFileError when it cannot be read, or is none by its size or kind."""
    try:
        # Asked before it is opened: to open a pipe would wait for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise PolicyFileError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise PolicyFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) > FILE_BYTES_MAX:
        raise PolicyFileError(f"{path}: is larger than {FILE_BYTES_MAX} bytes")
    return content


def parse_policy_file(content: bytes, name: str) -> PolicyFile:
    """Check the content of a policy file; ``name`` stands at the front of each line of a PolicyFileError."""
    try:
        document = Document(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PolicyFileError(f"{name}:{line}: is not UTF-8 text") from None
    except YamlError as error:
        raise PolicyFileError(f"{name}:{error.line}: {error}") from None
    given = document.value
    if given is None:
        raise PolicyFileError(f"{name}:1: is empty: give at least the workers")
    if not isinstance(given, dict):
        raise PolicyFileError(f"{name}:1: must be a mapping of fields: admission, requests, workers")
    try:
        policy = PolicyFile.model_validate(given, by_alias=True, by_name=False, context=SPEC)
        found = [*_clashes(policy.workers), *_misfits(policy)]
    except ValidationError as error:
        found = [_in_file(problem) for problem in problems(error, PolicyFile, given)]
    if not found:
        return policy
    placed = sorted(((_line(document, problem), str(problem)) for problem in found), key=lambda fault: fault[0])
    raise PolicyFileError("\n".join(f"{name}:{line}: {text}" for line, text in placed))


def _in_file(problem: Problem) -> Problem:
    """Say more where the file differs from what its writer may have in mind."""
    match problem.path:
        case ("workers",):
            return Problem(problem.path, "at least one worker is required, as a list of {name, address, ports}")
        case ("disaggregation", "roleLabel"):
            return Problem(problem.path, "unknown field; in a file each worker has its role")
        case ("selection", str(name)) if name in _ADMISSION_FIELDS:
            return Problem(problem.path, f"selection takes no parameters; {name} belongs to admission")
        case ("selection", str()):
            return Problem(problem.path, "unknown field; selection takes no parameters")
        case _:
            return problem


_ADMISSION_FIELDS: Final = frozenset(
    spelling for name, field in AdmissionPolicy.model_fields.items() for spelling in (name, field.alias or name)
)


def _clashes(workers: list[WorkerSpec]) -> list[Problem]:
    """Names and endpoints that two workers share: the picker tells workers apart by either."""
    found = []
    names: dict[str, int] = {}
    owners: dict[str, int] = {}
    for index, worker in enumerate(workers):
        first = names.setdefault(worker.name, index)
        if first != index:
            found.append(Problem(("workers", index, "name"), f"{worker.name} is the name of workers[{first}] already"))
        for rank, endpoint in enumerate(worker.endpoints()):
            owner = owners.setdefault(endpoint, index)
            if owner != index:
                message = f"{endpoint} belongs to worker {workers[owner].name} already"
                found.append(Problem(("workers", index, "ports", rank), message))
    return found


def _misfits(policy: PolicyFile) -> list[Problem]:
    """What does not go with the topology."""
    if policy.disaggregated:
        if all(worker.role == "prefill" for worker in policy.workers):
            return [Problem(("workers",), "at least one must have the role decode or prefill-decode")]
        return []
    found = [Problem(("workers", i, "role"), _DISAGGREGATED_ONLY) for i, w in enumerate(policy.workers) if w.role]
    if policy.disaggregation is not None:
        found.append(Problem(("disaggregation",), _DISAGGREGATED_ONLY))
    return found


_DISAGGREGATED_ONLY: Final = "goes with topology Disaggregated only"


def _line(document: Document, problem: Problem) -> int:
    return document.line(problem.near or problem.path)
