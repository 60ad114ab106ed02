"""What the gateway says about itself while the demo runs: the picker's state and counters, the workers' caches.

Read over HTTP from the pages anybody can read, `/state` and `/metrics` of the picker and `/metrics` of each worker;
the live view draws one `Observation`, and the last one of a phase gives the table its numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from thunderagent_sim.gateway import Gateway
from thunderagent_sim.processes import PartError

_ANSWER_WITHIN_SECONDS: Final = 5.0
_LET_THE_WATCH_SPEAK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class WorkerObservation:
    """One worker. ``charged_tokens`` is the picker's ledger, the rest the worker's own word.

    ``queried_tokens`` and ``hit_tokens`` count prompt tokens looked up and found in its cache since it started.
    """

    name: str
    capacity_tokens: int
    charged_tokens: int
    busy_tokens: int
    requests: int
    queried_tokens: int
    hit_tokens: int
    computes_prompts: bool = True
    """Whether prompts are looked up in its cache to save their prefill; a decode worker loads them."""


@dataclass(frozen=True, slots=True)
class ProgramObservation:
    """Where the picker has a program; ``worker`` is None for a paused one."""

    worker: str | None
    paused: bool


@dataclass(frozen=True, slots=True)
class Observation:
    """The gateway at one moment. ``holds`` counts the turns held so far, those held now (``held``) included."""

    workers: tuple[WorkerObservation, ...]
    programs: Mapping[str, ProgramObservation]
    held: int
    holds: int
    pauses: int
    resumes: int

    def hits_since(self, before: Observation) -> tuple[int, int]:
        """Prompt tokens found in the caches of what computes prompts since ``before``, and those looked up."""
        return self._hits - before._hits, self._queries - before._queries

    @property
    def _hits(self) -> int:
        return sum(worker.hit_tokens for worker in self.workers if worker.computes_prompts)

    @property
    def _queries(self) -> int:
        return sum(worker.queried_tokens for worker in self.workers if worker.computes_prompts)


class _Worker(msgspec.Struct):
    worker: str
    used_tokens: int
    capacity_tokens: int | None
    role: str


class _Program(msgspec.Struct):
    lifecycle: str
    worker: str | None


class _State(msgspec.Struct):
    workers: list[_Worker]
    programs: dict[str, _Program]


async def observe(gateway: Gateway, client: aiohttp.ClientSession) -> Observation:
    """Ask every part once. Raises PartError that names the one that does not answer."""
    state_page, picker_page, *worker_pages = await asyncio.gather(
        _page(client, "picker", f"{gateway.picker_url}/state"),
        _page(client, "picker", f"{gateway.picker_url}/metrics"),
        *(_page(client, name, f"{url}/metrics") for name, url in gateway.worker_urls.items()),
    )
    return read_observation(state_page, picker_page, dict(zip(gateway.worker_urls, worker_pages, strict=True)))


def read_observation(state_page: str, picker_page: str, worker_pages: Mapping[str, str]) -> Observation:
    """Read the pages of one moment; ``worker_pages`` by the workers' names."""
    state = msgspec.json.decode(state_page, type=_State)
    picker = _samples(picker_page)
    held = picker.total("thunderagent_holds")
    return Observation(
        workers=tuple(_worker(worker, _samples(worker_pages[worker.worker])) for worker in state.workers),
        programs={
            session: ProgramObservation(program.worker, program.lifecycle == "paused")
            for session, program in state.programs.items()
        },
        held=held,
        holds=held + picker.total("thunderagent_hold_duration_seconds_count"),
        pauses=picker.total("thunderagent_pauses_total"),
        resumes=picker.total("thunderagent_resumes_total"),
    )


def _worker(worker: _Worker, page: _Samples) -> WorkerObservation:
    capacity = worker.capacity_tokens or 0
    return WorkerObservation(
        name=worker.worker,
        capacity_tokens=capacity,
        charged_tokens=worker.used_tokens,
        busy_tokens=round(page.sum("vllm:kv_cache_usage_perc") * capacity),
        requests=page.total("vllm:num_requests_running") + page.total("vllm:num_requests_waiting"),
        queried_tokens=page.total("vllm:prefix_cache_queries_total"),
        hit_tokens=page.total("vllm:prefix_cache_hits_total"),
        computes_prompts=worker.role != "decode",
    )


@dataclass(frozen=True, slots=True)
class _Samples:
    by_name: Mapping[str, float]

    def sum(self, name: str) -> float:
        return self.by_name.get(name, 0.0)

    def total(self, name: str) -> int:
        return round(self.sum(name))


def _samples(page: str) -> _Samples:
    """The samples of a metrics page, those of one name added up over their labels."""
    by_name: dict[str, float] = {}
    samples: Iterable[tuple[str, float]] = (
        (sample.name, sample.value) for family in text_string_to_metric_families(page) for sample in family.samples
    )
    for name, value in samples:
        by_name[name] = by_name.get(name, 0.0) + value
    return _Samples(by_name)


async def _page(client: aiohttp.ClientSession, part: str, url: str) -> str:
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_SECONDS), client.get(url) as response:
            response.raise_for_status()
            return await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        # If the part has died, whoever watches it knows more; this is for one that hangs.
        await asyncio.sleep(_LET_THE_WATCH_SPEAK_SECONDS)
        why = str(error) or type(error).__name__
        raise PartError(f"{part} does not answer at {url}: {why} - run the demo again") from None
