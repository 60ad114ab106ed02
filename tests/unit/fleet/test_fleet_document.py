"""docs/simulation.md against the code: its files can be read, its table is the one that was fitted to."""

from __future__ import annotations

import re
from pathlib import Path

from thunderagent_sim.fleet.fit import MEASURED, Cell, cost
from thunderagent_sim.fleet.measures import Measures
from thunderagent_sim.fleet.recorded import read_workload
from thunderagent_sim.fleet.service import FITTED, load_service

DOCUMENT = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text("utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found is not None
    return found[1]


def row(title: str) -> list[str]:
    line = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_engine_file_can_be_read(tmp_path):
    path = tmp_path / "my-gpus.yaml"
    path.write_text(block("yaml"))
    assert set(load_service(path).model_fields_set) == set(type(FITTED).model_fields)


def test_the_recorded_sessions_can_be_read():
    workload = read_workload(block("jsonl").encode().splitlines(), "my-sessions.jsonl")
    assert workload.largest_context_tokens == 25_400


def test_the_measured_row_is_what_was_fitted_to():
    assert row("sessions/pod") == [str(cell.sessions_per_pod) for cell in MEASURED]
    assert row("measured, output tokens/s") == [f"{cell.output_tokens_per_second:g}" for cell in MEASURED]
    assert row("measured hit rate") == [f"{cell.hit_rate:.3f}".removeprefix("0") for cell in MEASURED]


def test_the_fitted_constants_are_those_of_the_document():
    assert row("`footprint`")[0] == f"{FITTED.footprint:g}"
    assert row("`step_seconds`")[0] == f"{FITTED.step_seconds * 1e3:g} ms"
    assert row("`prefill_token_seconds`")[0] == f"{FITTED.prefill_token_seconds * 1e6:g} µs"
    assert row("`attention_seconds`")[0] == f"{FITTED.attention_seconds * 1e9:g} ns"
    assert row("`decode_sequence_seconds`")[0] == f"{FITTED.decode_sequence_seconds * 1e3:g} ms"
    assert row("`decode_context_seconds`")[0] == f"{FITTED.decode_context_seconds * 1e9:g} ns"


def test_a_fit_costs_its_squared_residuals():
    def run(rate: float, hit: float, between: float) -> Measures:
        return Measures(rate, hit, 0, 0, 0, 0, 0, 0, 0, 1, 0, between)

    exact = (Cell(8, 1000, 0.5, 20), run(1000, 0.5, 0.020))
    assert cost([exact]) == 0
    assert round(cost([(Cell(8, 1000, 0.5, 20), run(1100, 0.3, 0.024))]), 9) == round(0.01 + 0.02 + 0.01, 9)
    assert round(cost([(Cell(32, 1000, 0.5, 20), run(1100, 0.5, 0.040))]), 9) == 0.01
