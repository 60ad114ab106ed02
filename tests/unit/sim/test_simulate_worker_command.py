"""``thunderagent simulate-worker`` as a process: one line when it listens, an end on a signal, errors in one line."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
import typer
from typer.testing import CliRunner

from thunderagent_sim.commands import simulate_worker

PROGRAM = "import typer; from thunderagent_sim.commands import simulate_worker; typer.run(simulate_worker)"


def app() -> typer.Typer:
    program = typer.Typer()
    program.command()(simulate_worker)
    return program


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_ends_cleanly_on_a_signal(number):
    command = [sys.executable, "-c", PROGRAM, "--port", "0", "--capacity-tokens", "3210", "--model", "m"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.fullmatch(
                r"simulated worker listening on (http://127\.0\.0\.1:\d+) \(model m, 3200 tokens of KV cache\)\n", line
            )
            assert match is not None, line
            with urllib.request.urlopen(match[1] + "/health") as response:
                assert response.status == 200
            process.send_signal(number)
            output, errors = process.communicate()
        finally:
            process.kill()
    assert (process.returncode, output, errors) == (0, "", "")


def test_a_port_that_is_taken_is_one_line_and_exit_1():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app(), ["--port", str(port)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"simulate-worker: cannot listen on 127.0.0.1:{port}: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "5", "--capacity-tokens", "80"], "give --capacity-tokens or --blocks, not both"),
        (["--capacity-tokens", "15"], "--capacity-tokens 15 is less than one block of 16"),
        (["--decode-tokens-per-second", "0"], "decode_tokens_per_second must be greater than 0"),
        (["--step", "0"], "step must be greater than 0"),
        (["--step", "nan"], "step must be greater than 0, not nan"),
        (["--step", "inf"], "step must be greater than 0, not inf"),
        (["--step=-1"], "step must be greater than 0, not -1.0"),
        (["--startup-delay", "nan"], "--startup-delay"),
        (["--startup-delay", "inf"], "startup_delay must be 0 seconds or more, not inf"),
        (["--startup-delay=-1"], "--startup-delay"),
        (["--prefill-tokens-per-second", "nan"], "prefill_tokens_per_second must be greater than 0, not nan"),
        (["--prefill-tokens-per-second", "inf"], "prefill_tokens_per_second must be greater than 0, not inf"),
        (["--decode-tokens-per-second=-1"], "decode_tokens_per_second must be greater than 0, not -1.0"),
        (["--decode-tokens-per-second", "nan"], "decode_tokens_per_second must be greater than 0, not nan"),
    ],
)
def test_an_option_out_of_range_is_named_and_exit_2(arguments, message):
    result = CliRunner().invoke(app(), arguments, env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert message in result.stderr
