from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
from grpc_tools import protoc

from thunderagent_epp.feed import capacity_feed_pb2 as pb
from thunderagent_epp.scheduling.policy import AdmissionPolicy

REPOSITORY = Path(__file__).parents[3]
FEED = "thunderagent_epp/feed/capacity_feed"
VERSIONS = re.compile(r"# Protobuf Python Version: .*|Domain\.PUBLIC,\s+\d+,\s+\d+,\s+\d+,|GRPC_GENERATED_VERSION = .*")
"""What differs between releases of the generator while the code is the same."""


def without_versions(text: str) -> str:
    return VERSIONS.sub("", text)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("proto")
    includes = str(files("grpc_tools") / "_proto")
    arguments = [f"--proto_path={REPOSITORY / 'epp'}", f"--proto_path={includes}", f"--python_out={out}"]
    arguments += [f"--pyi_out={out}", f"--grpc_python_out={out}", f"{FEED}.proto"]
    assert protoc.main(["protoc", *arguments]) == 0
    return out


@pytest.mark.parametrize(
    ("suffix", "prefix"),
    [("_pb2.py", ""), ("_pb2.pyi", "# mypy: ignore-errors\n"), ("_pb2_grpc.py", "# mypy: ignore-errors\n")],
)
def test_the_code_beside_the_proto_is_what_make_proto_generates(generated: Path, suffix: str, prefix: str) -> None:
    checked_in = (REPOSITORY / "epp" / f"{FEED}{suffix}").read_text()
    expected = prefix + (generated / f"{FEED}{suffix}").read_text()
    assert without_versions(checked_in) == without_versions(expected), "run `make proto`"


def test_every_parameter_of_admission_travels() -> None:
    assert set(pb.Admission.DESCRIPTOR.fields_by_name) == set(AdmissionPolicy.model_fields)


def test_a_parameter_left_out_can_be_told_from_zero() -> None:
    assert all(field.has_presence for field in pb.Admission.DESCRIPTOR.fields)
