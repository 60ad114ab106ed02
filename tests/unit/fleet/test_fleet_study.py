"""The study writes its tables and pictures, here for a fleet so small that nothing is held."""

from __future__ import annotations

from pathlib import Path

import pytest

from thunderagent_sim.fleet import study
from thunderagent_sim.fleet.run import Scenario


def test_a_study_is_tables_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "LOADS", (1,))
    monkeypatch.setattr(study, "SEEDS", (1,))
    monkeypatch.setattr(study, "FLEETS", {"one pod": Scenario(1, pods=1, minutes=11)})
    study.study(tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert "## 1 sessions per pod" in text
    assert "## One pod, 32 sessions per pod, seed 1" in text
    assert "| prefix |" in text
    assert "| rotation |" in text
    assert (tmp_path / "front.png").exists()
