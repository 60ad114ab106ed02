"""Text to tokens and back: a conversation that grows extends its own tokens."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from thunderagent_sim import tokens


def test_a_token_is_four_bytes_of_text_and_the_last_one_may_be_short():
    assert tokens.count(tokens.pack("")) == 0
    assert tokens.count(tokens.pack("abcd")) == 1
    assert tokens.count(tokens.pack("abcde")) == 2
    assert tokens.count(tokens.pack("€")) == 1
    assert tokens.pack("abcde") == b"abcde\0\0\0"


def test_a_lone_surrogate_is_one_character():
    assert tokens.pack("ab\ud800d") == b"ab?d"


@given(prompt=st.binary(), length=st.integers(1, 9000), cuts=st.lists(st.integers(0, 9000)))
def test_an_answer_is_the_same_however_it_is_cut(prompt, length, cuts):
    seed = tokens.answer_seed(prompt)
    whole = tokens.answer(seed, 0, length, length)
    places = sorted({0, length, *(cut for cut in cuts if cut < length)})
    pieces = [tokens.answer(seed, start, stop, length) for start, stop in itertools.pairwise(places)]
    assert b"".join(pieces) == whole
    assert tokens.count(whole) == length


@given(prompt=st.binary(), length=st.integers(1, 300))
def test_an_answer_sent_back_is_the_tokens_that_were_generated(prompt, length):
    generated = tokens.answer(tokens.answer_seed(prompt), 0, length, length)
    assert tokens.pack(generated.decode().strip()) == generated


def test_different_prompts_get_different_answers():
    first, second = (tokens.answer(tokens.answer_seed(prompt), 0, 8, 8) for prompt in (b"one", b"two"))
    assert first != second


def test_the_next_turn_extends_prompt_and_answer():
    user = tokens.message("user", tokens.pack("fix it, please"))
    prompt = tokens.chat_prompt([user])
    answer = tokens.answer(tokens.answer_seed(prompt), 0, 10, 10)
    next_prompt = tokens.chat_prompt(
        [user, tokens.message("assistant", tokens.pack(answer.decode())), tokens.message("tool", tokens.pack("ok"))]
    )
    assert next_prompt.startswith(prompt + answer)


def test_equal_prefixes_have_equal_keys_and_a_difference_changes_all_keys_after_it():
    one: list[int] = []
    two: list[int] = []
    tokens.chain_keys(one, tokens.pack("aaaabbbbccccdddd"), block_size=1)
    tokens.chain_keys(two, tokens.pack("aaaabbbbXXXXdddd"), block_size=1)
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, True, False, False]


def test_keys_are_only_of_full_blocks_and_are_extended_in_place():
    keys: list[int] = []
    context = bytearray(tokens.pack("aaaabbbbcccc"))
    tokens.chain_keys(keys, context, block_size=2)
    assert len(keys) == 1
    context += tokens.pack("dddd")
    tokens.chain_keys(keys, context, block_size=2)
    whole: list[int] = []
    tokens.chain_keys(whole, context, block_size=2)
    assert keys == whole
    assert len(keys) == 2
