"""BytesPerToken: the size of a prompt in tokens, learned from usage."""

from __future__ import annotations

import pytest

from thunderagent_epp.requests.tokens import BytesPerToken


@pytest.mark.parametrize(("prompt_bytes", "tokens"), [(0, 0), (1, 1), (4, 1), (5, 2), (400, 100), (401, 101)])
def test_a_model_starts_at_four_bytes_a_token_rounded_up(prompt_bytes, tokens):
    assert BytesPerToken().input_tokens("m", prompt_bytes) == tokens


def test_each_sample_moves_the_ratio_a_fifth_of_the_way():
    sizes = BytesPerToken()
    sizes.observe("m", 900, 100)
    assert sizes.ratio("m") == pytest.approx(5.0)
    sizes.observe("m", 1000, 100)
    assert sizes.ratio("m") == pytest.approx(6.0)
    sizes.observe("m", 100, 100)
    assert sizes.ratio("m") == pytest.approx(5.0)
    assert sizes.input_tokens("m", 51) == 11


def test_models_learn_apart():
    sizes = BytesPerToken()
    sizes.observe("a", 900, 100)
    assert sizes.ratio("b") == 4.0
    assert sizes.ratios() == {"a": pytest.approx(5.0)}


@pytest.mark.parametrize(("prompt_bytes", "prompt_tokens"), [(0, 10), (10, 0), (0, 0), (-1, 10), (10, -1)])
def test_a_sample_without_bytes_or_tokens_teaches_nothing(prompt_bytes, prompt_tokens):
    sizes = BytesPerToken()
    sizes.observe("m", prompt_bytes, prompt_tokens)
    assert sizes.ratios() == {}


def test_the_model_used_least_recently_is_forgotten():
    sizes = BytesPerToken(max_models=2)
    sizes.observe("a", 900, 100)
    sizes.observe("b", 900, 100)
    sizes.input_tokens("a", 10)
    sizes.observe("c", 900, 100)
    assert sorted(sizes.ratios()) == ["a", "c"]
    assert sizes.ratio("b") == 4.0


def test_asking_for_unknown_models_remembers_none():
    sizes = BytesPerToken()
    for number in range(1000):
        sizes.input_tokens(f"model-{number}", 10)
    assert sizes.ratios() == {}


def test_only_so_many_models_and_no_endless_names_are_remembered():
    sizes = BytesPerToken()
    for number in range(1000):
        sizes.observe(f"model-{number}", 8, 2)
    sizes.observe("m" * 513, 8, 2)
    assert len(sizes.ratios()) == 256


def test_ratios_are_those_of_the_moment():
    sizes = BytesPerToken()
    before = sizes.ratios()
    sizes.observe("m", 900, 100)
    assert before == {}
