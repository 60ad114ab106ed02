"""The charts, rendered and checked by a real helm: the one `HELM` names, else the one on PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "thunderagent"
CRDS_CHART = ROOT / "charts" / "thunderagent-crds"
CI_VALUES = sorted((CHART / "ci").glob("*.yaml"))

HELM_VARIABLE = "HELM"

Manifest = dict[str, Any]


class HelmError(Exception):
    """What helm said on its way out."""


def helm_binary() -> str:
    """Skips the test where there is none."""
    found = shutil.which(os.environ.get(HELM_VARIABLE) or "helm")
    if found is None:
        pytest.skip(f"no helm: neither does {HELM_VARIABLE} name one nor is there one on PATH")
    return found


def helm(*arguments: str | Path, standard_input: str = "", environment: dict[str, str] | None = None) -> str:
    """Run helm and return what it printed. Raises HelmError."""
    done = subprocess.run(
        [helm_binary(), *map(str, arguments)],
        input=standard_input,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise HelmError(done.stderr + done.stdout)
    return done.stdout


def render(
    values: Path | Manifest, *, release: str = "thunderagent", namespace: str = "thunderagent"
) -> list[Manifest]:
    """Every object of the chart with these values, as ``helm template`` prints them. Raises HelmError."""
    given = values.read_text() if isinstance(values, Path) else yaml.safe_dump(values)
    arguments = ("--namespace", namespace, "--kube-version", "1.33", "--values", "-")
    printed = helm("template", release, CHART, *arguments, standard_input=given)
    return [document for document in yaml.safe_load_all(printed) if document]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one object of this kind and name."""
    (found,) = [one for one in manifests if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """All of one kind, in the order in which they are printed."""
    return [one for one in manifests if one["kind"] == kind]
