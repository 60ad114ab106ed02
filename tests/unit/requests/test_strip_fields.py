"""strip_fields: the named fields go, every other byte stays."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent_epp.requests.body import strip_fields


@pytest.mark.parametrize(
    ("body", "stripped"),
    [
        (b'{"program_id":"p","model":"m"}', b'{"model":"m"}'),
        (b'{"model":"m","program_id":"p"}', b'{"model":"m"}'),
        (b'{"a":12,"program_id":[{"x":"]"},[]],"a":1,"program_id":2,"b":"x"}', b'{"a":12,"a":1,"b":"x"}'),
        (b'{"program_id":"a,}\\"","b":{"c":1},"b":{"c":2}, "program_id":"z"}', b'{"b":{"c":1},"b":{"c":2}}'),
        (b'{"a":1,"program_id":"p","b":2}', b'{"a":1,"b":2}'),
        (b'{"program_id":"p"}', b"{}"),
        (b'{"a":1,"program_id":{"x":[1,{"y":"}],"}]},"b":2}', b'{"a":1,"b":2}'),
        (b'{"a":[1,2,{"b":[3]}],"program_id":[4,5],"c":{"d":{}}}', b'{"a":[1,2,{"b":[3]}],"c":{"d":{}}}'),
        (b'{"a":1,"program_id":1,"b":2,"program_id":2}', b'{"a":1,"b":2}'),
        (b'{"a":1,"pr\\u006fgram_id":1}', b'{"a":1}'),
        (b'{"a":"\\",\\"program_id\\":1","program_id":2}', b'{"a":"\\",\\"program_id\\":1"}'),
        (b'{"a":"x\\\\","program_id":2}', b'{"a":"x\\\\"}'),
        (b'{"a":"program_id","program_id":"a"}', b'{"a":"program_id"}'),
        (b' {\n  "a" : 1.50 ,\n  "program_id" : null ,\n  "b" : [ ]\n}\n', b' {\n  "a" : 1.50 ,\n  "b" : [ ]\n}\n'),
        (b'{"":0,"program_id":1}', b'{"":0}'),
        ('{"ü":"é","program_id":"p"}'.encode(), '{"ü":"é"}'.encode()),
    ],
)
def test_a_field_is_removed_and_the_rest_kept_byte_for_byte(body, stripped):
    assert strip_fields(body, ("program_id",)) == stripped


def test_several_fields_are_removed_at_once():
    assert strip_fields(b'{"a":1,"b":2,"c":3,"d":4}', ("a", "d", "c")) == b'{"b":2}'
    assert strip_fields(b'{"a":1,"b":2}', ("a", "b")) == b"{}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b'["program_id"]',
        b'"program_id"',
        b"{}",
        b'{ "a": 1 }',
        b'{"a":{"program_id":1}}',
        b'{"a":[{"program_id":1}],"b":"program_id"}',
        b'{"program_id":1',
        b'{"program_id":' + b"[" * 100_000,
    ],
)
def test_a_body_without_the_field_is_left_as_it_is(body):
    assert strip_fields(body, ("program_id",)) is body


def test_no_fields_leave_the_body_as_it_is():
    body = b'{"a":1}'
    assert strip_fields(body, ()) is body


# A surrogate on its own is no text: such a body is refused before anything is stripped.
NO_SURROGATES = st.characters(exclude_categories=["Cs"])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(NO_SURROGATES, max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(NO_SURROGATES, max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.lists(st.tuples(st.sampled_from(["program_id", "a", "b", '"', "\\", ",", "}"]), JSON), max_size=6),
    st.sampled_from(["", " ", "\n\t"]),
)
def test_the_result_is_the_object_written_without_the_fields(members, space):
    def written(kept):
        return "{" + ",".join(f"{space}{json.dumps(k)}{space}:{json.dumps(v)}{space}" for k, v in kept) + "}"

    kept = [(name, value) for name, value in members if name not in ("program_id", "b")]
    assert strip_fields(written(members).encode(), ("program_id", "b")) == written(kept).encode()


@given(st.binary(max_size=100))
def test_any_bytes_are_survived(body):
    strip_fields(body, ("a",))
    strip_fields(b'{"a":' + body + b"}", ("a",))
