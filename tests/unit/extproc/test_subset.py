"""The subset hint (extproc.md, *Subsets*)."""

from __future__ import annotations

from typing import Any

import pytest
from envoy.config.core.v3.base_pb2 import Metadata
from proxy_messages import metadata, subset_hint

from thunderagent_epp.extproc.subset import Subset


def read(value: Any) -> Subset:
    subset = Subset.from_metadata(subset_hint(value))
    assert subset is not None
    return subset


def test_without_the_namespace_or_the_key_every_worker_may_be_chosen() -> None:
    assert Subset.from_metadata(Metadata()) is None
    assert Subset.from_metadata(metadata({"envoy.lb.subset_hint": {"other": "10.0.0.1:80"}})) is None
    assert Subset.from_metadata(metadata({"envoy.lb": {"x-gateway-destination-endpoint-subset": "10.0.0.1"}})) is None


def test_looking_for_the_hint_leaves_the_message_as_it_was() -> None:
    message = metadata({"envoy.lb.subset_hint": {"other": "x"}})
    before = message.SerializeToString(deterministic=True)
    Subset.from_metadata(message)
    assert message.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    "value",
    [
        ["10.0.0.1:8000", "10.0.0.2:8000"],
        "10.0.0.1:8000,10.0.0.2:8000",
        " 10.0.0.1:8000 , 10.0.0.2:8000 ",
        [" 10.0.0.1:8000, 10.0.0.2:8000 "],
        ["10.0.0.1:8000,", None, 3, True, ["10.0.0.3:8000"], {"a": "10.0.0.3:8000"}, " 10.0.0.2:8000"],
    ],
)
def test_lists_strings_and_mixes_name_the_same_endpoints(value: Any) -> None:
    subset = read(value)
    assert subset.allows("10.0.0.1:8000")
    assert subset.allows("10.0.0.2:8000")
    assert not subset.allows("10.0.0.1:8001")
    assert not subset.allows("10.0.0.3:8000")


@pytest.mark.parametrize("value", [[], "", " , ", [""], None, 7, True, {"a": "10.0.0.1"}, [None, 7]])
def test_present_without_any_address_allows_nothing(value: Any) -> None:
    subset = read(value)
    assert subset == Subset()
    assert not subset.allows("10.0.0.1:8000")


def test_an_ip_alone_means_every_port_of_it() -> None:
    subset = read("10.0.0.1")
    assert subset.allows("10.0.0.1:8000")
    assert subset.allows("10.0.0.1:9000")
    assert not subset.allows("10.0.0.10:8000")


@pytest.mark.parametrize("value", ["fd00::1", "[fd00::1]", "fd00:0:0::0001"])
def test_an_ipv6_address_alone_means_every_port_of_it(value: str) -> None:
    subset = read(value)
    assert subset.allows("[fd00::1]:8000")
    assert subset.allows("[fd00::1]:9000")
    assert not subset.allows("[fd00::2]:8000")


def test_an_ipv6_address_with_a_port_means_that_port() -> None:
    subset = read("[FD00::1]:8000")
    assert subset.allows("[fd00::1]:8000")
    assert not subset.allows("[fd00::1]:8001")
