"""How a probe is written: a generator that asks for documents and returns what they say, without I/O.

`prober.py` runs it against a worker, a test against a table. Sent in for each question is the document's bytes, or
None where the worker has no such document (any HTTP status but 200). A worker that cannot be reached ends the probe
from outside.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final, TypeAlias

from thunderagent_operator.probes.reading import Capacity, MetricsPage


@dataclass(frozen=True, slots=True)
class MetricsText:
    """Ask for the metrics; ``path`` None for that of the policy."""

    path: str | None = None


@dataclass(frozen=True, slots=True)
class JsonDocument:
    """Ask for a document of the engine's own API, which is on the rank's port."""

    path: str


METRICS: Final = MetricsText()

Question: TypeAlias = MetricsText | JsonDocument
Plan: TypeAlias = Generator[Question, bytes | None, Capacity | None]
"""Returns None while the capacity is unknown; raises UnreadableError for an answer that makes no sense."""


def ask_metrics(question: MetricsText = METRICS) -> Generator[Question, bytes | None, MetricsPage]:
    """The metrics page, an empty one where there is none."""
    return MetricsPage((yield question) or b"")
