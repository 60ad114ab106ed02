import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent_operator.probes import llamacpp, sglang, trtllm, vllm
from thunderagent_operator.probes.auto import named_by, probe_of
from thunderagent_operator.probes.plan import MetricsText, Plan
from thunderagent_operator.probes.reading import Capacity, MetricsPage, UnreadableError

CASES = Path(__file__).parents[2] / "cases" / "metrics"
EXPECTED = json.loads((CASES / "expected.json").read_text())


def engine_of(name: str) -> str:
    return name.partition("-")[0]


def answer(plan: Plan, documents: Mapping[str, bytes]) -> tuple[Capacity | None, list[str]]:
    """What a probe learns of a worker with these documents, and the paths it asked for."""
    asked = []
    try:
        question = next(plan)
        while True:
            path = question.path or "/metrics" if isinstance(question, MetricsText) else question.path
            asked.append(path)
            question = plan.send(documents.get(path))
    except StopIteration as end:
        return end.value, asked


def tokens(engine: str, metrics: str | bytes, label: str | None = None) -> int | None:
    page = metrics.encode() if isinstance(metrics, str) else metrics
    capacity, _ = answer(probe_of(engine, label), {"/metrics": page})
    return None if capacity is None else capacity.tokens


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_metrics_of_real_engines_are_read(name: str) -> None:
    assert tokens(engine_of(name), (CASES / name).read_bytes()) == EXPECTED[name]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_auto_finds_the_engine_by_its_metrics(name: str) -> None:
    assert tokens("auto", (CASES / name).read_bytes()) == EXPECTED[name]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_metrics_of_real_engines_cut_off_anywhere_are_never_read_as_another_capacity(name: str) -> None:
    page = (CASES / name).read_bytes()
    seen = set()
    for end in range(len(page)):
        try:
            seen.add(tokens("auto", page[:end]))
        except UnreadableError:
            seen.add(None)
    # A cut at the end of a line leaves a page that is whole, with fewer ranks.
    fewer_ranks = {"vllm-two-engines.prom": {16000}, "sglang-dp2.prom": {150000}}
    assert seen <= {None, EXPECTED[name]} | fewer_ranks.get(name, set())


VLLM = 'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"%s} 1.0\n'


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", 1600),
        (',kv_cache_size_tokens="1500"', 1500),
        (',kv_cache_size_tokens="1500.0"', 1500),
        (',kv_cache_size_tokens="None"', 1600),
        (',kv_cache_size_tokens="0"', 1600),
        (',kv_cache_size_tokens=""', 1600),
        (',kv_cache_size_tokens="-5"', 1600),
        (',kv_cache_size_tokens="1e3"', 1600),
        (',kv_cache_size_tokens="99999999999999999999999"', 1600),
        (',num_cpu_blocks="1000"', 1600),
        (',kv_offloading_size="64",cpu_cache_tokens="5000"', 1600),
        (',note="}\\n vllm:cache_config_info{num_gpu_blocks=\\"7\\"} 1"', 1600),
    ],
)
def test_vllm_tells_tokens_or_else_blocks(more: str, expected: int) -> None:
    assert tokens("vllm", VLLM % more) == expected


@pytest.mark.parametrize("blocks", ["None", "0", "", "-3", "nan", "inf", "1e9", "٣", "12 000", "9" * 18, "9" * 5000])
def test_vllm_is_unknown_while_its_blocks_are_no_number(blocks: str) -> None:
    assert tokens("vllm", f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n') is None


def test_vllm_is_unknown_while_one_of_its_engines_is() -> None:
    starting = 'vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert tokens("vllm", VLLM % "" + starting) is None


def test_vllm_shows_the_series_of_before_and_after_profiling_as_one_engine() -> None:
    before = 'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert tokens("vllm", before + VLLM % "") == 1600


def test_vllm_tells_its_block_size() -> None:
    assert vllm.capacity(MetricsPage((VLLM % "").encode())) == Capacity(1600, 16)


def test_engines_of_different_block_sizes_have_none_in_common() -> None:
    other = 'vllm:cache_config_info{engine="1",block_size="32",num_gpu_blocks="100"} 1.0\n'
    assert vllm.capacity(MetricsPage((VLLM % "" + other).encode())) == Capacity(4800, None)


def test_a_metric_whose_name_only_begins_alike_is_another_one() -> None:
    assert tokens("vllm", 'vllm:cache_config_info_old{block_size="16",num_gpu_blocks="100"} 1.0\n') is None


def test_sglang_adds_up_data_parallel_ranks_and_takes_the_largest_replica() -> None:
    page = (
        'sglang:max_total_num_tokens{dp_rank="0",tp_rank="0",pp_rank="0",moe_ep_rank="0"} 1000\n'
        'sglang:max_total_num_tokens{dp_rank="0",tp_rank="1",pp_rank="0",moe_ep_rank="1"} 1010\n'
        'sglang:max_total_num_tokens{dp_rank="0",tp_rank="0",pp_rank="1",moe_ep_rank="0"} 990\n'
        'sglang:max_total_num_tokens{dp_rank="1",tp_rank="0",pp_rank="0",moe_ep_rank="0"} 2000\n'
    )
    assert tokens("sglang", page) == 3010


def test_sglang_tells_its_page_size() -> None:
    page = b"sglang:max_total_num_tokens 1000\nsglang:page_size 64\n"
    assert sglang.capacity(MetricsPage(page)) == Capacity(1000, 64)


def test_sglang_never_counts_its_copy_in_host_memory() -> None:
    assert tokens("sglang", "sglang:hicache_host_total_tokens 400001\n") is None


def test_sglang_is_read_from_its_old_metric_while_the_new_one_is_zero() -> None:
    page = 'sglang:max_total_num_tokens 0\nsglang:cache_config_info{num_pages="10",page_size="64"} 1\n'
    assert tokens("sglang", page) == 640


@pytest.mark.parametrize("path", ["/get_server_info", "/server_info"])
def test_sglang_without_metrics_describes_itself(path: str) -> None:
    info = b'{"model_path":"m","internal_states":[{"x":1}],"page_size":1,"max_total_num_tokens":12345}'
    assert answer(sglang.probe(), {path: info})[0] == Capacity(12345, 1)


def test_sglang_is_asked_for_its_description_only_where_the_metrics_do_not_tell() -> None:
    _, asked = answer(sglang.probe(), {"/metrics": b"sglang:max_total_num_tokens 1000\n"})
    assert asked == ["/metrics"]
    _, asked = answer(sglang.probe(), {})
    assert asked == ["/metrics", "/get_server_info", "/server_info"]


def test_trtllm_multiplies_blocks_and_their_tokens() -> None:
    page = b'trtllm_kv_cache_max_blocks{pid="1"} 100\ntrtllm_kv_cache_tokens_per_block{pid="1"} 32\n'
    assert trtllm.capacity(MetricsPage(page)) == Capacity(3200, 32)


def test_trtllm_is_unknown_without_the_tokens_of_a_block() -> None:
    assert tokens("trtllm", "trtllm_kv_cache_max_blocks 100\n") is None
    assert tokens("trtllm", "trtllm_kv_cache_max_blocks 100\ntrtllm_kv_cache_tokens_per_block 0\n") is None


def test_trtllm_serve_has_its_metrics_elsewhere() -> None:
    page = b"trtllm_kv_cache_max_blocks 100\ntrtllm_kv_cache_tokens_per_block 32\n"
    documents = {"/metrics": b'[{"gpuMemUsage": 1}]', "/prometheus/metrics": page}
    assert answer(trtllm.probe(), documents)[0] == Capacity(3200, 32)


def test_llamacpp_multiplies_its_slots_and_their_context() -> None:
    props = b'{"default_generation_settings":{"n_ctx":4096,"params":{}},"total_slots":4,"model_path":"m.gguf"}'
    assert answer(llamacpp.probe(), {"/props": props}) == (Capacity(16384), ["/props"])


@pytest.mark.parametrize(
    "props",
    [
        b"{}",
        b'{"default_generation_settings":null,"total_slots":4}',
        b'{"default_generation_settings":{"n_ctx":0},"total_slots":4}',
        b'{"default_generation_settings":{"n_ctx":4096},"total_slots":0}',
        b'{"default_generation_settings":{"n_ctx":4096},"total_slots":-1}',
        b'{"default_generation_settings":{"n_ctx":4096.5},"total_slots":1}',
        b'{"default_generation_settings":{"n_ctx":1e300},"total_slots":1e300}',
    ],
)
def test_llamacpp_is_unknown_without_slots_or_context(props: bytes) -> None:
    assert answer(llamacpp.probe(), {"/props": props})[0] is None


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"null", b'{"total_slots":"4"}', b'{"a":' + b"[" * 100_000, b"\xff\xfe", b'{"tot']
)
def test_json_that_is_not_what_was_asked_for_is_unreadable(body: bytes) -> None:
    with pytest.raises(UnreadableError):
        answer(llamacpp.probe(), {"/props": body})
    with pytest.raises(UnreadableError):
        answer(sglang.probe(), {"/server_info": body.replace(b"total_slots", b"max_total_num_tokens")})


@pytest.mark.parametrize("value", ["0", "-1", "NaN", "+Inf", "-Inf", "0.5", "1e13", "1e308", "1e999", "9" * 400])
def test_a_number_that_no_machine_holds_is_unknown(value: str) -> None:
    assert tokens("sglang", f"sglang:max_total_num_tokens {value}\n") is None
    assert tokens("trtllm", f"trtllm_kv_cache_max_blocks {value}\ntrtllm_kv_cache_tokens_per_block 32\n") is None


def test_a_sum_that_no_machine_holds_is_unknown() -> None:
    page = "".join(f'sglang:max_total_num_tokens{{dp_rank="{rank}"}} 900000000000\n' for rank in range(2))
    assert tokens("sglang", page) is None


@pytest.mark.parametrize("page", ["", "\n", "<!DOCTYPE html>\n<html><body>404</body></html>\n", "# HELP vllm: x\n"])
@pytest.mark.parametrize("engine", ["auto", "vllm", "sglang", "trtllm", "llamacpp"])
def test_a_page_that_says_nothing_is_unknown(engine: str, page: str) -> None:
    assert tokens(engine, page) is None


@pytest.mark.parametrize(
    "line",
    [
        'vllm:cache_config_info{block_size="16",num_gpu_bl',
        'vllm:cache_config_info{block_size="16",num_gpu_bl\n',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"}\n',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} \n',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} one\n',
        'vllm:cache_config_info{block_size="16",block_size="32",num_gpu_blocks="100"} 1\n',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="\xff"} 1\n'.encode("latin-1"),
        VLLM % "" + 'vllm:cache_config_info{engine="1",block_size="16"',
        VLLM % "" + 'vllm:cache_config_info{engine="1",block_size="16"\n',
    ],
)
def test_half_a_line_makes_the_page_unreadable(line: str | bytes) -> None:
    with pytest.raises(UnreadableError):
        tokens("vllm", line)


def test_a_page_in_the_open_metrics_format_is_read_to_its_end_mark() -> None:
    assert tokens("vllm", (VLLM % "") + "# EOF") == 1600
    assert tokens("vllm", (VLLM % "").replace("\n", "\r\n")) == 1600


def test_a_page_with_thousands_of_other_lines_is_read_by_the_lines_asked_for() -> None:
    noise = "".join(f'vllm:time_bucket{{le="{index}"}} not even a number\n' for index in range(50_000))
    assert tokens("vllm", noise + VLLM % "" + noise) == 1600


@pytest.mark.parametrize(
    ("label", "engine"),
    [
        ("vllm", "vllm"),
        (" SGLang ", "sglang"),
        ("trtllm", "trtllm"),
        ("trtllm-serve", "trtllm"),
        ("llama.cpp", "llamacpp"),
        ("none", None),
        ("tgi", None),
        ("", None),
        (None, None),
    ],
)
def test_an_engine_label_names_an_engine(label: str | None, engine: str | None) -> None:
    assert named_by(label) == engine


def test_auto_goes_by_the_label_before_the_metrics() -> None:
    page = VLLM % "" + "sglang:max_total_num_tokens 5\n"
    assert tokens("auto", page, label="sglang") == 5
    assert tokens("auto", page, label="unheard-of") == 1600


def test_auto_asks_an_engine_it_recognised_for_what_its_metrics_do_not_tell() -> None:
    props = b'{"default_generation_settings":{"n_ctx":4096},"total_slots":2}'
    documents = {"/metrics": b"llamacpp:requests_processing 0\n", "/props": props}
    assert answer(probe_of("auto"), documents) == (Capacity(8192), ["/metrics", "/props"])


@given(st.sampled_from(["auto", *sorted({engine_of(name) for name in EXPECTED})]), st.data())
def test_a_page_with_anything_in_it_is_a_capacity_unknown_or_unreadable(engine: str, data: st.DataObject) -> None:
    page = bytearray((CASES / data.draw(st.sampled_from(sorted(EXPECTED)))).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(page)))
        page[at : at + data.draw(st.integers(0, 12))] = data.draw(
            st.one_of(st.binary(max_size=6), st.sampled_from([b'"', b"{", b"}", b"\\", b"\n", b",", b"=", b" ", b"#"]))
        )
    try:
        known = tokens(engine, bytes(page))
    except UnreadableError:
        known = None
    assert known is None or 0 < known <= 10**12


@given(st.binary(max_size=200))
def test_any_bytes_as_json_are_a_capacity_unknown_or_unreadable(body: bytes) -> None:
    for plan, path in ((llamacpp.probe(), "/props"), (sglang.probe(), "/server_info")):
        try:
            answer(plan, {path: body})
        except UnreadableError:
            continue
