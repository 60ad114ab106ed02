"""What becomes of a command's output: read in part, or not to be written at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-P", "-m", "thunderagent_epp.cli")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace whose decisions are more than a pipe and Python's own buffer hold."""
    file = tmp_path / "trace.jsonl"
    file.write_text('{"event":"dump"}\n' * 5000)
    return file


def run(*arguments: str | Path, stdout: int) -> tuple[int, str]:
    ended = subprocess.run(
        [*COMMAND, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=60
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("command", ["replay", "envoy-config"])
def test_a_command_whose_reader_has_left_ends_without_a_word(command: str, trace: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run(command, *((trace,) if command == "replay" else ()), stdout=writer) == (141, "")
    finally:
        os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["replay", "envoy-config"])
def test_output_that_cannot_be_written_is_one_line_that_does_not_blame_the_input(command: str, trace: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        assert run(command, *((trace,) if command == "replay" else ()), stdout=full) == (
            1,
            "thunderagent: standard output: No space left on device\n",
        )
    finally:
        os.close(full)


def test_a_ca_that_is_not_on_this_machine_is_a_remark_and_the_configuration_comes_all_the_same(tmp_path: Path) -> None:
    absent = tmp_path / "ca.pem"
    ended = subprocess.run(
        [*COMMAND, "envoy-config", "--picker-ca", absent], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0
    assert f"filename: {absent}" in ended.stdout
    assert ended.stderr == (
        f"thunderagent: warning: --picker-ca: there is no file {absent} here; Envoy needs it where it runs\n"
    )
