from pathlib import Path

import pytest

from thunderagent_epp.feed.policy_file import PolicyFile, PolicyFileError, load_policy_file, parse_policy_file
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.scheduling.capacity import Role, Worker, WorkerRank
from thunderagent_epp.scheduling.topology import Disaggregation, Handoff, RetentionPool

ONE_WORKER = "workers: [{name: a, address: 10.0.0.1, ports: [8000]}]\n"


def parsed(text: str) -> PolicyFile:
    return parse_policy_file(text.encode(), "policy.yaml")


def refusal(text: str | bytes) -> list[str]:
    with pytest.raises(PolicyFileError) as caught:
        parse_policy_file(text.encode() if isinstance(text, str) else text, "policy.yaml")
    return str(caught.value).splitlines()


def test_the_example_of_the_contract_becomes_one_worker_per_port() -> None:
    snapshot = parsed(
        "admission: {pauseThreshold: 0.9}\n"
        "workers:\n"
        "  - {name: a, address: 10.0.0.1, ports: [8000, 8001], capacityTokens: 120000}    # each port one rank\n"
        "  - {name: b, address: 10.0.0.2, ports: [8000]}                                  # capacity unknown\n"
    ).snapshot(1)
    assert snapshot.id == 1
    assert snapshot.admission.pause_threshold == 0.9
    assert snapshot.capacity.liveness_known is True
    assert snapshot.capacity.workers == (
        Worker(WorkerRank("a", 0), endpoint="10.0.0.1:8000", capacity_tokens=120000, incarnation="10.0.0.1:8000"),
        Worker(WorkerRank("a", 1), endpoint="10.0.0.1:8001", capacity_tokens=120000, incarnation="10.0.0.1:8001"),
        Worker(WorkerRank("b", 0), endpoint="10.0.0.2:8000", capacity_tokens=None, incarnation="10.0.0.2:8000"),
    )


def test_every_admission_parameter_is_read_by_its_name_in_the_spec() -> None:
    admission = parsed(
        ONE_WORKER + "admission: {policy: Disabled, pauseThreshold: 1, pauseTarget: 0.5, resumeHysteresis: 0.2,\n"
        "            resumeTimeout: 1h30m, sessionRetention: 500ms, schedulerInterval: 2s, actingTokenWeight: 0.5,\n"
        "            actingDecayTau: 3s, bufferPerProgram: 0, maxTrackedRequests: 5,\n"
        "            holdBudget: 0.1, prefillTokensPerSecond: 5000, maxHold: 10s}\n"
    ).admission
    assert admission.model_dump() == {
        "policy": "Disabled",
        "pause_threshold": 1.0,
        "pause_target": 0.5,
        "resume_hysteresis": 0.2,
        "resume_timeout_seconds": 5400.0,
        "session_retention_seconds": 0.5,
        "scheduler_interval_seconds": 2.0,
        "acting_token_weight": 0.5,
        "acting_decay_tau_seconds": 3.0,
        "buffer_per_program": 0,
        "max_tracked_requests": 5,
        "hold_budget": 0.1,
        "prefill_tokens_per_second": 5000.0,
        "max_hold_seconds": 10.0,
    }


def test_an_ipv6_worker_has_a_bracketed_endpoint_in_the_short_form() -> None:
    (worker,) = parsed("workers: [{name: a, address: 'FD00:0::1', ports: [8000]}]").snapshot(1).capacity.workers
    assert worker.endpoint == "[fd00::1]:8000"


def test_session_headers_are_lower_case_and_body_fields_as_given() -> None:
    text = ONE_WORKER + "requests: {sessionHeaders: [X-My-Session], stripBodyFields: [program_id]}\n"
    assert parsed(text).snapshot(1).requests == RequestPolicy(("x-my-session",), ("program_id",))


@pytest.mark.parametrize("headers", ["requests: {}", "requests: {sessionHeaders: null}", "requests:", ""])
def test_without_session_headers_the_built_in_list_is_meant(headers: str) -> None:
    assert parsed(ONE_WORKER + headers).snapshot(1).requests == RequestPolicy(None, ())


def test_a_section_whose_lines_are_all_comments_is_as_if_left_out() -> None:
    assert parsed(ONE_WORKER + "admission:\n  # pauseThreshold: 0.9\nselection:\nrequests:\n") == parsed(ONE_WORKER)


def test_aliases_and_merged_fields_are_followed() -> None:
    policy = parsed(
        "workers:\n"
        "- &a {name: a, address: 10.0.0.1, ports: &ports [8000, 8001], capacityTokens: 5}\n"
        "- {<<: *a, name: b, address: 10.0.0.2}\n"
    )
    assert [(worker.name, worker.ports, worker.capacity_tokens) for worker in policy.workers] == [
        ("a", [8000, 8001], 5),
        ("b", [8000, 8001], 5),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("pauseThreshold: 1.5", "pauseThreshold: must be between 0 and 1, not 1.5"),
        ("pauseTarget: -0.1", "pauseTarget: must be between 0 and 1, not -0.1"),
        ("pauseThreshold: high", "pauseThreshold: must be a number, not 'high'"),
        ("pauseThreshold: '0.9'", "pauseThreshold: must be a number, not '0.9'"),
        ("pauseThreshold: yes", "pauseThreshold: must be a number, not true"),
        ("pauseThreshold:", "pauseThreshold: must be a number, not empty"),
        ("pauseThreshold: .nan", "pauseThreshold: must be a finite number, not nan"),
        ("actingTokenWeight: 0", "actingTokenWeight: must be above 0, not 0"),
        ("bufferPerProgram: -1", "bufferPerProgram: must be at least 0, not -1"),
        ("bufferPerProgram: 1.5", "bufferPerProgram: must be a whole number, not 1.5"),
        ("policy: classic", "policy: must be Disabled, Classic or Rotation, not 'classic'"),
        (
            "resumeTimeout: 30",
            "resumeTimeout: must be a duration such as 500ms, 10s, 30m or 1h30m, not 30",
        ),
        (
            "resumeTimeout: 30 min",
            "resumeTimeout: must be a duration such as 500ms, 10s, 30m or 1h30m, not '30 min'",
        ),
        ("maxHold: 0s", "maxHold: must be above 0, not '0s'"),
        ("pauseTreshold: 0.9", "pauseTreshold: unknown field; did you mean pauseThreshold?"),
        ("pause_threshold: 0.9", "pause_threshold: unknown field; did you mean pauseThreshold?"),
        ("colour: red", "colour: unknown field"),
    ],
)
def test_a_bad_admission_parameter_is_named_with_its_line(line: str, complaint: str) -> None:
    text = f"{ONE_WORKER}admission:\n  # how full\n  {line}\n"
    assert refusal(text) == [f"policy.yaml:4: admission.{complaint}"]


def test_a_target_above_the_threshold_is_shown_where_the_target_is_written() -> None:
    text = ONE_WORKER + "admission:\n  pauseTarget: 0.8\n  pauseThreshold: 0.7\n"
    (line,) = refusal(text)
    assert line.startswith("policy.yaml:3: admission.pauseTarget: must not be above the pause threshold")


def test_a_target_left_at_its_default_above_the_threshold_is_shown_where_the_threshold_is_written() -> None:
    text = ONE_WORKER + "admission:\n  bufferPerProgram: 1\n  pauseThreshold: 0.5\n"
    (line,) = refusal(text)
    assert line.startswith("policy.yaml:4: admission.pauseTarget: must not be above the pause threshold")
    assert line.endswith("(0.8 is the default)")


def test_a_hysteresis_above_the_threshold_is_named() -> None:
    (line,) = refusal(ONE_WORKER + "admission: {pauseThreshold: 0.3, pauseTarget: 0.2, resumeHysteresis: 0.4}\n")
    assert line.startswith("policy.yaml:2: admission.resumeHysteresis: must not be above the pause threshold")


@pytest.mark.parametrize("name", ["pauseThreshold", "pause_threshold"])
def test_an_admission_parameter_under_selection_is_sent_where_it_belongs(name: str) -> None:
    assert refusal(f"{ONE_WORKER}selection: {{{name}: 0.9}}\n") == [
        f"policy.yaml:2: selection.{name}: selection takes no parameters; {name} belongs to admission"
    ]


def test_anything_else_under_selection_is_named() -> None:
    assert refusal(ONE_WORKER + "selection:\n  weight: 1\n") == [
        "policy.yaml:3: selection.weight: unknown field; selection takes no parameters"
    ]


@pytest.mark.parametrize("workers", ["", "workers:", "workers: []", "workers: {}", "workers: a"])
def test_a_file_without_workers_is_refused(workers: str) -> None:
    assert refusal(f"admission: {{}}\n{workers}\n") == [
        f"policy.yaml:{2 if workers else 1}: "
        "workers: at least one worker is required, as a list of {name, address, ports}"
    ]


@pytest.mark.parametrize(
    ("worker", "complaint"),
    [
        ("{address: 10.0.0.2, ports: [1]}", ".name: is required"),
        ("{name: 12, address: 10.0.0.2, ports: [1]}", ".name: must be text, not 12; put it in quotes"),
        (
            "{name: a/0, address: 10.0.0.2, ports: [1]}",
            ".name: must be letters, digits, '-', '_' and '.', at most 253, not 'a/0'",
        ),
        ("{name: a, address: 10.0.0.2, ports: [1]}", ".name: a is the name of workers[0] already"),
        (
            "{name: b, address: vllm.llm.svc, ports: [1]}",
            ".address: must be an IP address, not 'vllm.llm.svc'; host names are not resolved",
        ),
        (
            "{name: b, address: 'fe80::1%eth0', ports: [1]}",
            ".address: must be an IP address without a zone, not 'fe80::1%eth0'",
        ),
        ("{name: b, address: 0.0.0.0, ports: [1]}", ".address: must be the address of one worker, not '0.0.0.0'"),
        ("{name: b, address: 10.0.0.2}", ".ports: is required"),
        ("{name: b, address: 10.0.0.2, ports: 8000}", ".ports: must be a list, not 8000"),
        ("{name: b, address: 10.0.0.2, ports: []}", ".ports: must have at least 1, not 0"),
        ("{name: b, address: 10.0.0.2, ports: [1, 2, 3, 4, 5, 6, 7, 8, 9]}", ".ports: must have at most 8, not 9"),
        (
            "{name: b, address: 10.0.0.2, ports: [8000, 8001, 8000]}",
            ".ports: 8000 is there twice; each port is a rank of its own",
        ),
        ("{name: b, address: 10.0.0.2, ports: [0]}", ".ports[0]: must be between 1 and 65535, not 0"),
        ("{name: b, address: 10.0.0.2, ports: [1, 65536]}", ".ports[1]: must be between 1 and 65535, not 65536"),
        ("{name: b, address: 10.0.0.2, ports: ['80']}", ".ports[0]: must be a whole number, not '80'"),
        (
            "{name: b, address: 10.0.0.1, ports: [7999, 8000]}",
            ".ports[1]: 10.0.0.1:8000 belongs to worker a already",
        ),
        (
            "{name: b, address: 10.0.0.2, ports: [1], capacityTokens: 0}",
            ".capacityTokens: must be between 1 and 1000000000000, not 0",
        ),
        (
            "{name: b, address: 10.0.0.2, ports: [1], capacityTokens: 100000000000000000000000000}",
            ".capacityTokens: must be between 1 and 1000000000000, not 100000000000000000000000000",
        ),
        ("{name: b, adress: 10.0.0.2, address: 10.0.0.2, ports: [1]}", ".adress: unknown field; did you mean address?"),
        ("8000", ": must be a mapping of fields, not 8000"),
    ],
)
def test_a_bad_worker_is_named_with_its_line(worker: str, complaint: str) -> None:
    text = f"workers:\n- {{name: a, address: 10.0.0.1, ports: [8000]}}\n- {worker}\n"
    assert refusal(text) == [f"policy.yaml:3: workers[1]{complaint}"]


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ("topology: Star", "topology: must be Aggregated or Disaggregated, not 'Star'"),
        ("disaggregation: {handoff: LlmD}", "disaggregation: goes with topology Disaggregated only"),
        (
            "disaggregation: {roleLabel: r}",
            "disaggregation.roleLabel: unknown field; in a file each worker has its role",
        ),
        (
            "disaggregation: {retentionPool: decode}",
            "disaggregation.retentionPool: must be Decode, Prefill or Both, not 'decode'",
        ),
        ("requests: {sessionHeaders: [':path']}", "requests.sessionHeaders[0]: must be a header's name, not ':path'"),
        ("requests: {sessionHeaders: [X-A, x-a]}", "requests.sessionHeaders: x-a is there twice"),
        ("requests: {sessionHeaders: x-a}", "requests.sessionHeaders: must be a list, not 'x-a'"),
        (
            "requests: {stripBodyFields: ['']}",
            "requests.stripBodyFields[0]: must be the name of a top-level field, not empty",
        ),
        ("requests: 3", "requests: must be a mapping of fields, not 3"),
        ("spec: {}", "spec: unknown field"),
    ],
)
def test_a_bad_section_is_named_with_its_line(section: str, complaint: str) -> None:
    assert refusal(f"{ONE_WORKER}{section}\n") == [f"policy.yaml:2: {complaint}"]


def test_every_fault_is_one_line_in_the_order_of_the_file() -> None:
    assert refusal(
        "workers:\n"
        "  - name: a\n"
        "    address: vllm\n"
        "    ports:\n"
        "      - 8000\n"
        "      - 70000\n"
        "admission:\n"
        "  pauseThreshold: 2\n"
        "  colour: red\n"
    ) == [
        "policy.yaml:3: workers[0].address: must be an IP address, not 'vllm'; host names are not resolved",
        "policy.yaml:6: workers[0].ports[1]: must be between 1 and 65535, not 70000",
        "policy.yaml:8: admission.pauseThreshold: must be between 0 and 1, not 2",
        "policy.yaml:9: admission.colour: unknown field",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "policy.yaml:1: is empty: give at least the workers"),
        ("# nothing yet\n", "policy.yaml:1: is empty: give at least the workers"),
        ("- a\n", "policy.yaml:1: must be a mapping of fields: admission, requests, workers"),
        ("a: [\n", "policy.yaml:2: is not valid YAML: did not find expected node content"),
        ("a: 1\n\tb: 2\n", "policy.yaml:2: is not valid YAML: found a tab character that violates indentation"),
        ("workers: []\nadmission: {}\nworkers: []\n", "policy.yaml:3: workers: is there twice"),
        ("admission:\n  policy: Classic\n  policy: Classic\n", "policy.yaml:3: admission.policy: is there twice"),
        ("admission:\n  1: 2\n", "policy.yaml:2: admission: a field's name must be text; put it in quotes"),
        ("? [a]\n: 1\n", "policy.yaml:1: a field's name must be text; put it in quotes"),
        ("workers: &all [*all]\n", "policy.yaml:1: workers[0]: is a value that holds itself"),
        ("workers: !env WORKERS\n", "policy.yaml:1: workers: the tag !env is not allowed"),
        ("a: 2024-13-45\n", "policy.yaml:1: a: is no valid timestamp: month must be in 1..12"),
        ("workers: [{<<: 3}]\n", "policy.yaml:1: workers[0]: only a mapping can be merged in with <<"),
        ("a: *nowhere\n", "policy.yaml:1: is not valid YAML: found undefined alias"),
        ("---\na: 1\n---\nb: 1\n", "policy.yaml:3: is not valid YAML: but found another document"),
        ("# é\na: \x07\n", "policy.yaml:2: holds a character YAML does not allow: #x0007"),
        (b"a: b\nc: \xe9\n", "policy.yaml:2: is not UTF-8 text"),
    ],
)
def test_what_is_no_policy_file_at_all_is_one_line(text: str | bytes, line: str) -> None:
    (said,) = refusal(text)
    assert said.startswith(line)


def test_nesting_without_end_is_refused() -> None:
    (said,) = refusal("[" * 100_000)
    assert said.startswith("policy.yaml:1: is ")


def test_aliases_of_aliases_are_refused_without_being_spelled_out() -> None:
    layers = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 30))
    said = refusal(f"l0: &l0 [x]\n{layers}\nworkers: *l29\n")
    assert said[0] == "policy.yaml:1: l0: unknown field"


def test_a_file_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + ONE_WORKER.encode())
    assert load_policy_file(path) == parsed(ONE_WORKER)


def test_a_missing_file_a_directory_and_a_huge_file_are_one_line_each(tmp_path: Path) -> None:
    missing, huge = tmp_path / "missing.yaml", tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * (4 * 1024 * 1024 + 1))
    for path, said in [
        (missing, f"{missing}: cannot be read: No such file or directory"),
        (tmp_path, f"{tmp_path}: is not a regular file"),
        (huge, f"{huge}: is larger than 4194304 bytes"),
    ]:
        with pytest.raises(PolicyFileError) as caught:
            load_policy_file(path)
        assert str(caught.value) == said


def test_a_worker_may_say_how_it_is_probed() -> None:
    policy = parsed(
        "workers:\n"
        "- {name: a, address: 10.0.0.1, ports: [8000], engine: sglang, blockSize: 32, probeInterval: 30s,\n"
        "   metrics: {path: /m, port: 9400, scheme: https}}\n"
        "- {name: b, address: 10.0.0.2, ports: [8000], metrics: {port: null}}\n"
    )
    told, untold = policy.workers
    assert (told.engine, told.probe_interval_seconds, told.metrics.model_dump()) == (
        "sglang",
        30.0,
        {"path": "/m", "port": 9400, "scheme": "https"},
    )
    assert (untold.engine, untold.probe_interval_seconds, untold.metrics.model_dump()) == (
        "auto",
        10.0,
        {"path": "/metrics", "port": None, "scheme": "http"},
    )
    assert [worker.block_size for worker in policy.snapshot(1).capacity.workers] == [32, 16]


def test_what_is_wrong_in_how_a_worker_is_probed_is_told_by_its_field() -> None:
    assert refusal(
        "workers:\n- {name: a, address: 10.0.0.1, ports: [8000],\n   engine: vLLM,\n   metrics: {path: metrics}}\n"
    ) == [
        "policy.yaml:3: workers[0].engine: must be auto, vllm, sglang, trtllm, llamacpp or none, not 'vLLM'",
        "policy.yaml:4: workers[0].metrics.path: must be an absolute path such as /metrics, not 'metrics'",
    ]


TWO_POOLS = """\
topology: Disaggregated
workers:
  - {name: p, address: 10.0.0.1, ports: [8000], role: prefill}
  - {name: d, address: 10.0.0.2, ports: [8000], role: decode}
  - {name: e, address: 10.0.0.3, ports: [8000]}
  - {name: f, address: 10.0.0.4, ports: [8000, 8001], role: prefill-decode}
"""


def test_disaggregated_workers_have_roles_decode_where_none_is_given() -> None:
    snapshot = parsed(TWO_POOLS).snapshot(1)
    assert [(str(worker.id), worker.role) for worker in snapshot.capacity.workers] == [
        ("d/0", Role.DECODE),
        ("e/0", Role.DECODE),
        ("f/0", Role.BOTH),
        ("f/1", Role.BOTH),
        ("p/0", Role.PREFILL),
    ]
    assert snapshot.disaggregation == Disaggregation(RetentionPool.DECODE, Handoff.LLM_D)


def test_the_terms_of_disaggregation_are_read() -> None:
    terms = parsed(TWO_POOLS + "disaggregation: {retentionPool: Both, handoff: Dynamo}\n").snapshot(1).disaggregation
    assert terms == Disaggregation(RetentionPool.BOTH, Handoff.DYNAMO)


def test_aggregated_workers_have_no_roles() -> None:
    snapshot = parsed(ONE_WORKER).snapshot(1)
    assert (snapshot.capacity.workers[0].role, snapshot.disaggregation) == (Role.BOTH, None)
    assert refusal("workers:\n  - {name: a, address: 10.0.0.1, ports: [8000], role: decode}\n") == [
        "policy.yaml:2: workers[0].role: goes with topology Disaggregated only"
    ]


def test_disaggregated_needs_a_worker_that_decodes() -> None:
    text = "topology: Disaggregated\nworkers:\n- {name: a, address: 10.0.0.1, ports: [1], role: prefill}\n"
    assert refusal(text) == ["policy.yaml:2: workers: at least one must have the role decode or prefill-decode"]


def test_an_unknown_role_is_refused() -> None:
    text = "topology: Disaggregated\nworkers:\n- {name: a, address: 10.0.0.1, ports: [1], role: both}\n"
    assert refusal(text) == ["policy.yaml:3: workers[0].role: must be prefill, decode or prefill-decode, not 'both'"]
