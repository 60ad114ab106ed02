"""Headers: a multimap whose names are lower-case."""

from __future__ import annotations

from thunderagent_epp.requests.headers import Headers


def test_names_are_lower_case_and_values_as_they_came():
    assert list(Headers([("X-Session-ID", "Abc"), (":path", "/X")])) == [("x-session-id", "Abc"), (":path", "/X")]


def test_a_repeated_header_stays_repeated():
    headers = Headers([("a", "1"), ("b", "2"), ("A", "3")])
    assert headers.get("a") == "1"
    assert headers.all("a") == ("1", "3")
    assert list(headers) == [("a", "1"), ("b", "2"), ("a", "3")]
    assert len(headers) == 3


def test_a_header_that_is_not_there_is_none():
    assert Headers([]).get("a") is None
    assert Headers([]).all("a") == ()


def test_values_do_not_show_in_the_representation():
    assert repr(Headers([("authorization", "Bearer secret"), ("a", "1")])) == "Headers(authorization, a)"
