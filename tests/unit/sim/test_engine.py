"""The engine: how long things take, who waits, who is preempted. Driven by the time alone."""

import pytest

from thunderagent_sim import tokens
from thunderagent_sim.engine import Engine, EngineOptions, Sequence, SequenceState


def engine(**options: object) -> Engine:
    """100 blocks of 4 tokens; 100 tokens/s of prefill, 10 tokens/s of decode."""
    return Engine(
        EngineOptions(
            **{
                "blocks": 100,
                "block_size": 4,
                "prefill_tokens_per_second": 100.0,
                "decode_tokens_per_second": 10.0,
                **options,
            }  # type: ignore[arg-type]
        )
    )


def prompt(name: str, length: int) -> bytes:
    """A prompt of so many tokens that shares nothing with another name's."""
    return b"".join(tokens.pack(f"{name}{number:03d}") for number in range(length))


def submit(subject: Engine, text: bytes, max_tokens: int, now: float) -> Sequence:
    return subject.submit(text, max_tokens, "length", now)


def run_to_end(subject: Engine, start: float) -> float:
    """Advance in steps of 10 ms until idle; return the time."""
    steps = 0
    while not subject.idle:
        steps += 1
        assert steps < 100_000
        subject.advance(start + steps / 100)
    return start + steps / 100


def test_a_cold_prompt_takes_its_tokens_over_the_prefill_rate():
    subject = engine()
    sequence = submit(subject, prompt("a", 50), 3, now=0.0)
    assert subject.advance(0.49) == []
    assert sequence.state is SequenceState.PREFILL
    assert subject.advance(0.5) == [sequence]
    assert sequence.generated_tokens == 1
    assert sequence.first_token_at == pytest.approx(0.5)


def test_then_tokens_come_at_the_decode_rate_until_the_limit():
    subject = engine()
    sequence = submit(subject, prompt("a", 50), 4, now=0.0)
    subject.advance(0.5)
    subject.advance(0.7)
    assert sequence.generated_tokens == 3
    assert subject.advance(5.0) == [sequence]
    assert sequence.generated_tokens == 4
    assert sequence.state is SequenceState.FINISHED
    assert sequence.finished_at == pytest.approx(0.8)
    assert subject.idle
    assert subject.cache.used == 0


def test_results_do_not_depend_on_the_step():
    coarse, fine = engine(), engine()
    ends = []
    for subject, step in ((coarse, 0.25), (fine, 0.01)):
        sequences = [submit(subject, prompt(name, 30), 7, now=0.0) for name in "ab"]
        number = 0
        while not subject.idle:
            number += 1
            subject.advance(number * step)
        ends.append([(round(s.first_token_at or 0, 6), round(s.finished_at or 0, 6)) for s in sequences])
    assert ends[0] == ends[1] == [(0.3, 0.9), (0.6, 1.2)]


def test_prefill_is_one_lane_first_come_first_served():
    subject = engine()
    first = submit(subject, prompt("a", 100), 1, now=0.0)
    second = submit(subject, prompt("b", 20), 1, now=0.1)
    run_to_end(subject, 0.1)
    assert first.first_token_at == pytest.approx(1.0)
    assert second.first_token_at == pytest.approx(1.2)


def test_decodes_run_side_by_side():
    subject = engine()
    sequences = [submit(subject, prompt(name, 10), 21, now=0.0) for name in "abc"]
    run_to_end(subject, 0.0)
    assert [round(s.finished_at or 0, 6) for s in sequences] == [2.1, 2.2, 2.3]


def test_a_second_turn_computes_only_what_is_new():
    subject = engine()
    first_prompt = prompt("a", 40)
    first = submit(subject, first_prompt, 9, now=0.0)
    run_to_end(subject, 0.0)
    # 40 + 9 tokens, of which the last generated one was never computed: 12 full blocks.
    second = submit(subject, first_prompt + first.answer + prompt("t", 11), 1, now=10.0)
    assert second.cached_tokens == 48
    run_to_end(subject, 10.0)
    assert second.first_token_at == pytest.approx(10.0 + (60 - 48) / 100)
    assert subject.counters.prefix_queries == 40 + 60
    assert subject.counters.prefix_hits == 48


def test_a_prompt_that_is_cached_whole_still_computes_its_last_block():
    subject = engine()
    text = prompt("a", 40)
    for now in (0.0, 10.0):
        sequence = submit(subject, text, 1, now)
        run_to_end(subject, now)
    assert sequence.cached_tokens == 36


def test_a_context_evicted_by_others_is_cold_again():
    subject = engine(blocks=12)
    for now, name, length in ((0.0, "a", 40), (10.0, "b", 44), (20.0, "a", 40)):
        sequence = submit(subject, prompt(name, length), 4, now)
        run_to_end(subject, now)
    assert sequence.cached_tokens == 0


def test_a_request_without_blocks_waits_and_those_behind_it_too():
    subject = engine(blocks=12)
    running = submit(subject, prompt("a", 40), 4, now=0.0)
    too_large = submit(subject, prompt("b", 40), 4, now=0.0)
    small = submit(subject, prompt("c", 4), 1, now=0.0)
    subject.advance(0.1)
    assert (subject.running, subject.waiting) == (1, 2)
    run_to_end(subject, 0.1)
    assert running.finished_at == pytest.approx(0.7)
    assert too_large.first_token_at is not None
    assert small.first_token_at is not None
    assert 1.1 <= too_large.first_token_at < small.first_token_at


def test_no_more_run_than_max_num_seqs():
    subject = engine(max_num_seqs=2)
    for name in "abc":
        submit(subject, prompt(name, 10), 5, now=0.0)
    assert (subject.running, subject.waiting) == (2, 1)
    run_to_end(subject, 0.0)
    assert subject.counters.finished_requests == {"stop": 0, "length": 3, "abort": 0}


def test_a_decode_without_a_block_preempts_the_youngest_which_finishes_later():
    subject = engine(blocks=20)
    old = submit(subject, prompt("a", 36), 40, now=0.0)
    young = submit(subject, prompt("b", 36), 40, now=0.0)
    run_to_end(subject, 0.0)
    assert subject.counters.preemptions >= 1
    assert old.finished_at == pytest.approx(0.36 + 3.9)
    assert young.finished_at is not None
    assert young.finished_at > old.finished_at + 2.0
    assert tokens.count(young.answer) == 40
    assert subject.counters.generation == 80
    assert subject.counters.prompt == 72
    assert subject.counters.prefix_queries == 72
    assert subject.cache.used == 0


def test_preemption_does_not_change_the_answer():
    crowded, roomy = engine(blocks=20), engine()
    answers = []
    for subject in (crowded, roomy):
        sequences = [submit(subject, prompt(name, 36), 40, now=0.0) for name in "ab"]
        run_to_end(subject, 0.0)
        answers.append([sequence.answer for sequence in sequences])
    assert crowded.counters.preemptions > 0
    assert roomy.counters.preemptions == 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize("when", [0.0, 0.2, 0.9])
def test_an_aborted_sequence_frees_its_blocks_at_once_whatever_it_was_doing(when):
    subject = engine()
    sequence = submit(subject, prompt("a", 50), 30, now=0.0)
    subject.advance(when)
    subject.abort(sequence, when)
    assert sequence.state is SequenceState.ABORTED
    assert subject.idle
    assert subject.cache.used == 0
    assert subject.counters.finished_requests == {"stop": 0, "length": 0, "abort": 1}


def test_a_waiting_sequence_can_be_aborted():
    subject = engine(max_num_seqs=1)
    submit(subject, prompt("a", 10), 1, now=0.0)
    waiting = submit(subject, prompt("b", 10), 1, now=0.0)
    subject.abort(waiting, 0.0)
    assert subject.waiting == 0


def test_an_aborted_prefill_gives_up_the_lane_and_keeps_what_it_computed():
    subject = engine()
    aborted = submit(subject, prompt("a", 100), 1, now=0.0)
    next_one = submit(subject, prompt("b", 20), 1, now=0.0)
    subject.advance(0.5)
    subject.abort(aborted, 0.5)
    run_to_end(subject, 0.5)
    assert next_one.first_token_at == pytest.approx(0.7)
    assert submit(subject, prompt("a", 100), 1, now=5.0).cached_tokens == 48


def test_aborting_what_has_finished_changes_nothing():
    subject = engine()
    sequence = submit(subject, prompt("a", 10), 1, now=0.0)
    subject.advance(1.0)
    subject.abort(sequence, 1.0)
    assert sequence.state is SequenceState.FINISHED
    assert subject.counters.finished_requests == {"stop": 0, "length": 1, "abort": 0}


def test_what_could_never_fit_is_refused():
    subject = engine(blocks=10)
    with pytest.raises(ValueError, match=r"36 \+ 5 tokens exceed 40"):
        submit(subject, prompt("a", 36), 5, now=0.0)
    submit(subject, prompt("a", 36), 4, now=0.0)
    run_to_end(subject, 0.0)
    assert subject.counters.generation == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 0}, "blocks must be greater than 0, not 0"),
        ({"block_size": 0}, "block_size must be greater than 0, not 0"),
        ({"decode_tokens_per_second": 0.0}, "decode_tokens_per_second must be greater than 0, not 0.0"),
        ({"prefill_tokens_per_second": float("inf")}, "prefill_tokens_per_second must be greater than 0, not inf"),
        ({"max_model_len": 401}, "max_model_len must be between 1 and the 400 tokens the cache holds, not 401"),
    ],
)
def test_an_option_out_of_range_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        engine(**options)
