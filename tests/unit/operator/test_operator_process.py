from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from thunderagent_epp.cli import app
from thunderagent_operator import commands, process
from thunderagent_operator.process import own_identity, own_namespace

runner = CliRunner()


def test_in_a_pod_the_lease_is_held_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "thunderagent-operator-7d9c-x2x4")
    assert own_identity() == "thunderagent-operator-7d9c-x2x4"


def test_elsewhere_two_operators_on_one_host_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POD_NAME", raising=False)
    assert own_identity() != own_identity()


def test_the_lease_is_in_the_pods_own_namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    account = tmp_path / "namespace"
    monkeypatch.setattr(process, "_NAMESPACE_FILE", account)
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    assert own_namespace() == "default", "outside of a cluster"
    account.write_text("thunderagent\n")
    assert own_namespace() == "thunderagent"
    monkeypatch.setenv("POD_NAMESPACE", "told")
    assert own_namespace() == "told"


def test_without_a_cluster_the_command_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    # The test's own logging stays as it is.
    monkeypatch.setattr(commands, "configure_logs", lambda level, format: None)
    result = runner.invoke(app, ["operator", "--feed-port", "0", "--http-port", "0"])
    assert result.exit_code == 1
    assert "no cluster to talk to" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--feed-port", "70000"], "65535"),
        (["--log-level", "loud"], "loud"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], said: str) -> None:
    result = runner.invoke(app, ["operator", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
