"""What the demo reads from the pages of picker and workers."""

import pytest
from aiohttp import ClientSession

from thunderagent_sim.gateway import Gateway
from thunderagent_sim.observation import ProgramObservation, WorkerObservation, observe, read_observation
from thunderagent_sim.processes import PartError
from thunderagent_sim.worker import SimulatedWorker

STATE = """{"policy":{},"snapshot":{"id":1},"holds":1,
"workers":[{"worker":"worker-1","rank":0,"endpoint":"127.0.0.1:1","role":"both","live":true,"capacity_tokens":1000,
            "used_tokens":420}],
"programs":{"s1":{"status":"acting","lifecycle":"active","worker":"worker-1","rank":0,"tokens":320,"steps":1,
                  "marked":false},
            "s2":{"status":"reasoning","lifecycle":"paused","worker":null,"rank":null,"tokens":500,"steps":1,
                  "marked":false}},
"used":{"worker-1/0":420},"waiting":["r2"],"tracked":1}"""
PICKER = """# TYPE thunderagent_holds gauge
thunderagent_holds 1.0
# TYPE thunderagent_hold_duration_seconds histogram
thunderagent_hold_duration_seconds_bucket{class="new",le="+Inf"} 3.0
thunderagent_hold_duration_seconds_count{class="new"} 3.0
thunderagent_hold_duration_seconds_sum{class="new"} 9.5
thunderagent_hold_duration_seconds_bucket{class="paused",le="+Inf"} 2.0
thunderagent_hold_duration_seconds_count{class="paused"} 2.0
thunderagent_hold_duration_seconds_sum{class="paused"} 1.5
# TYPE thunderagent_pauses counter
thunderagent_pauses_total 7.0
# TYPE thunderagent_resumes counter
thunderagent_resumes_total{forced="false"} 4.0
thunderagent_resumes_total{forced="true"} 1.0
"""
WORKER = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 800.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 600.0
"""


def test_the_pages_of_one_moment_are_one_observation() -> None:
    seen = read_observation(STATE, PICKER, {"worker-1": WORKER})
    assert seen.workers == (
        WorkerObservation(
            name="worker-1",
            capacity_tokens=1000,
            charged_tokens=420,
            busy_tokens=250,
            requests=3,
            queried_tokens=800,
            hit_tokens=600,
        ),
    )
    assert seen.programs == {"s1": ProgramObservation("worker-1", False), "s2": ProgramObservation(None, True)}
    assert (seen.held, seen.holds, seen.pauses, seen.resumes) == (1, 6, 7, 5)


def test_hits_are_counted_from_an_earlier_moment_on() -> None:
    before = read_observation(STATE, PICKER, {"worker-1": WORKER})
    later = WORKER.replace("800.0", "1000.0").replace("600.0", "750.0")
    assert read_observation(STATE, PICKER, {"worker-1": later}).hits_since(before) == (150, 200)


def test_only_workers_that_compute_prompts_count_for_hits() -> None:
    before = read_observation(STATE, PICKER, {"worker-1": WORKER})
    decode = STATE.replace('"role":"both"', '"role":"decode"')
    later = WORKER.replace("800.0", "1000.0").replace("600.0", "750.0")
    assert read_observation(decode, PICKER, {"worker-1": later}).hits_since(
        read_observation(decode, PICKER, {"worker-1": WORKER})
    ) == (0, 0)
    assert read_observation(STATE, PICKER, {"worker-1": later}).hits_since(before) == (150, 200)


async def test_the_page_of_a_real_worker_can_be_read(worker: SimulatedWorker, client: ClientSession) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "word " * 20}], "max_tokens": 2}
    for _ in range(2):
        async with client.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200
    async with client.get("/metrics") as response:
        page = await response.text()
    (seen,) = read_observation(STATE, PICKER, {"worker-1": page}).workers
    # 25 tokens of text and 7 around them; the second time all whole blocks of 4 but the last are there.
    assert (seen.queried_tokens, seen.hit_tokens, seen.requests) == (64, 28, 0)


async def test_a_part_that_does_not_answer_is_named(monkeypatch) -> None:
    monkeypatch.setattr("thunderagent_sim.observation._LET_THE_WATCH_SPEAK_SECONDS", 0)
    nobody = "http://127.0.0.1:1"
    gateway = Gateway(nobody, nobody, {}, None, (), None)  # type: ignore[arg-type]
    async with ClientSession() as client:
        with pytest.raises(PartError, match=r"^picker does not answer at http://127.0.0.1:1/"):
            await observe(gateway, client)
