from __future__ import annotations

from typing import Any

import pytest

from support.kube_objects import pod_object, policy_object, pool_object
from thunderagent_operator.api import PODS, POLICIES, POOLS, Kind, Listed
from thunderagent_operator.cluster import Cluster, Differences, Policy
from thunderagent_operator.selectors import PodSelector, Requirement

VLLM = PodSelector((Requirement("app", "In", ("vllm",)),))
SGLANG = PodSelector((Requirement("app", "In", ("sglang",)),))
NO_DIFFERENCES = Differences(set(), {})
BY_POOL = {"inferencePool": "coder"}


class Watched:
    """A cluster, and the policies it has called due since they were last asked for."""

    def __init__(self) -> None:
        self._due: set[str] = set()
        self.now = 100.0
        self.cluster = Cluster(self._due.add, lambda: self.now)

    def due(self) -> set[str]:
        due = set(self._due)
        self._due.clear()
        return due

    def take(self, kind: Kind, body: dict[str, Any], event: str | None = "ADDED") -> bool:
        return self.cluster.take(kind, event, body)

    def policy(self, name: str = "coder") -> Policy:
        return self.cluster.policies[f"llm/{name}"]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def other_labels(*values: str) -> dict[str, Any]:
    """Workers by another selector than the usual one."""
    expression = {"key": "app", "operator": "In", "values": list(values)}
    return {"selector": {"matchExpressions": [expression]}, "targetPorts": [8000]}


def test_pods_are_workers_of_a_policy_whichever_is_heard_of_first(watched: Watched) -> None:
    watched.take(PODS, pod_object("a"))
    watched.take(POLICIES, policy_object())
    watched.take(PODS, pod_object("b"))
    watched.take(PODS, pod_object("c", labels={"app": "sidecar"}))
    assert set(watched.policy().pods) == {"a", "b"}
    assert watched.due() == {"llm/coder"}


def test_a_policy_is_due_when_one_of_its_pods_changes_and_at_no_other_time(watched: Watched) -> None:
    watched.take(POLICIES, policy_object())
    watched.take(PODS, pod_object("a"))
    watched.due()
    same = pod_object("a")
    same["metadata"]["annotations"] = {"last-seen": "now"}
    watched.take(PODS, same, "MODIFIED")
    watched.take(PODS, pod_object("other", labels={"app": "sidecar"}))
    assert watched.due() == set()
    watched.take(PODS, pod_object("a", ready=False), "MODIFIED")
    assert watched.due() == {"llm/coder"}
    (rank,) = watched.policy().pods["a"].ranks
    assert not rank.worker.live


def test_a_pod_that_is_gone_is_no_worker(watched: Watched) -> None:
    watched.take(POLICIES, policy_object())
    watched.take(PODS, pod_object("a"))
    watched.due()
    watched.take(PODS, pod_object("a"), "DELETED")
    assert watched.policy().pods == {}
    assert watched.due() == {"llm/coder"}
    watched.take(PODS, pod_object("a"), "DELETED")
    assert watched.due() == set()


def test_a_policy_of_another_namespace_selects_nothing_here(watched: Watched) -> None:
    elsewhere = policy_object()
    elsewhere["metadata"]["namespace"] = "web"
    watched.take(POLICIES, elsewhere)
    watched.take(PODS, pod_object("a"))
    assert watched.cluster.policies["web/coder"].pods == {}


def test_a_policy_that_is_gone_is_due_one_last_time(watched: Watched) -> None:
    watched.take(POLICIES, policy_object())
    watched.due()
    watched.take(POLICIES, policy_object(), "DELETED")
    assert watched.due() == {"llm/coder"}
    assert watched.cluster.policies == {}
    assert watched.cluster.selectors() == set()


def test_a_bad_edit_leaves_the_last_good_spec_and_says_what_is_wrong(watched: Watched) -> None:
    watched.take(POLICIES, policy_object(admission={"pauseThreshold": 0.9}))
    watched.take(POLICIES, policy_object(admission={"pauseThreshold": 7}), "MODIFIED")
    policy = watched.policy()
    assert policy.spec is not None
    assert policy.spec.admission.pause_threshold == 0.9
    assert policy.problem is not None
    reason, message = policy.problem
    assert reason == "InvalidSpec"
    assert message.startswith("spec.admission.pauseThreshold: ")
    watched.take(POLICIES, policy_object(admission={"pauseThreshold": 0.8}), "MODIFIED")
    assert policy.problem is None


def test_an_edit_to_a_pool_that_is_not_there_leaves_the_whole_last_spec(watched: Watched) -> None:
    watched.take(POLICIES, policy_object(admission={"pauseThreshold": 0.9}))
    watched.take(PODS, pod_object("a"))
    watched.take(POLICIES, policy_object(workers=BY_POOL, admission={"pauseThreshold": 0.8}), "MODIFIED")
    policy = watched.policy()
    assert policy.problem is not None
    assert policy.problem[0] == "InferencePoolNotFound"
    assert policy.spec is not None
    assert policy.spec.admission.pause_threshold == 0.9, "not half of one and half of the other"
    assert set(policy.pods) == {"a"}
    watched.take(POOLS, pool_object())
    assert policy.problem is None
    assert policy.spec.admission.pause_threshold == 0.8


def test_a_policy_follows_its_pool(watched: Watched) -> None:
    watched.take(PODS, pod_object("a"))
    watched.take(PODS, pod_object("b", labels={"app": "sglang"}))
    watched.take(POLICIES, policy_object(workers=BY_POOL))
    assert watched.cluster.lacks_pools()
    assert watched.policy().pods == {}
    watched.due()
    watched.take(POOLS, pool_object("another"))
    assert watched.due() == set()
    watched.take(POOLS, pool_object())
    assert not watched.cluster.lacks_pools()
    assert watched.due() == {"llm/coder"}
    assert set(watched.policy().pods) == {"a"}
    watched.take(POOLS, pool_object(labels={"app": "sglang"}, ports=(8000, 8001)), "MODIFIED")
    assert set(watched.policy().pods) == {"b"}
    assert [rank.worker.id.rank for rank in watched.policy().pods["b"].ranks] == [0, 1]
    watched.due()
    watched.take(POOLS, pool_object(), "DELETED")
    assert watched.due() == {"llm/coder"}
    assert set(watched.policy().pods) == {"b"}, "what was good last stays in force"


@pytest.mark.parametrize("change", ["policy", "pod", "label"])
def test_whoever_shares_a_pod_is_due_when_that_begins_and_ends(watched: Watched, change: str) -> None:
    both, first, second = other_labels("vllm", "sglang"), {"llm/first"}, {"llm/second"}
    watched.take(POLICIES, policy_object("first", workers=both))
    watched.take(POLICIES, policy_object("third", workers=other_labels("trtllm")))
    watched.take(PODS, pod_object("a"))
    watched.due()
    match change:
        case "policy":
            watched.take(POLICIES, policy_object("second"))
            assert watched.due() == first | second
            watched.take(POLICIES, policy_object("second"), "DELETED")
            assert watched.due() == first | second
        case "pod":
            watched.take(POLICIES, policy_object("second"))
            watched.due()
            watched.take(PODS, pod_object("a"), "DELETED")
            assert watched.due() == first | second
        case _:
            watched.take(POLICIES, policy_object("second"))
            watched.due()
            watched.take(PODS, pod_object("a", labels={"app": "sglang"}), "MODIFIED")
            assert watched.due() == first | second
            assert watched.policy("second").pods == {}


def test_those_that_share_are_named_without_the_policy_itself_and_those_without_pods(watched: Watched) -> None:
    for name in ("first", "second"):
        watched.take(POLICIES, policy_object(name))
    watched.take(POLICIES, policy_object("third", workers=other_labels("trtllm")))
    watched.take(PODS, pod_object("a"))
    assert [policy.name for policy in watched.cluster.sharing(watched.policy("first"))] == ["llm/second"]


def test_the_selectors_are_those_of_policies_that_can_be_used(watched: Watched) -> None:
    watched.take(POLICIES, policy_object())
    watched.take(POLICIES, policy_object("pooled", workers=BY_POOL))
    watched.take(POLICIES, policy_object("bad", topology="Circular"))
    assert watched.cluster.selectors() == {VLLM}
    watched.take(POOLS, pool_object(labels={"app": "sglang"}))
    assert watched.cluster.selectors() == {VLLM, SGLANG}


def test_a_list_that_names_what_was_known_tells_that_the_watch_has_begun_anew(watched: Watched) -> None:
    assert not watched.take(PODS, pod_object("a"), None)
    assert not watched.take(PODS, pod_object("a"), "MODIFIED")
    assert watched.take(PODS, pod_object("a"), None)


def test_what_a_list_does_not_name_is_forgotten(watched: Watched) -> None:
    watched.take(POLICIES, policy_object())
    watched.take(PODS, pod_object("a"))
    watched.take(PODS, pod_object("b"))
    watched.due()
    assert watched.cluster.compare(PODS, {"llm/b": Listed("uid-b", "1")}, listed_at=101.0) == NO_DIFFERENCES
    assert set(watched.policy().pods) == {"b"}
    assert watched.due() == {"llm/coder"}


def test_what_was_heard_of_after_a_list_began_is_kept(watched: Watched) -> None:
    watched.take(POLICIES, policy_object())
    watched.now = 102.0
    watched.take(PODS, pod_object("a"))
    watched.cluster.compare(PODS, {}, listed_at=101.0)
    assert set(watched.policy().pods) == {"a"}


def test_what_a_list_names_and_no_watch_has_delivered_is_missing(watched: Watched) -> None:
    watched.take(PODS, pod_object("a"))
    watched.take(PODS, pod_object("b", uid="of the one before"))
    listed = {f"llm/{name}": Listed(f"uid-{name}", "1") for name in "abc"}
    found = watched.cluster.compare(PODS, listed, listed_at=101.0)
    assert found == Differences({"llm/b", "llm/c"}, {})


def test_what_a_list_shows_as_changed_since_is_stale(watched: Watched) -> None:
    for name in "abc":
        watched.take(PODS, pod_object(name, version="7"))
        watched.take(POLICIES, policy_object(name))
    listed = {"llm/a": Listed("uid-a", "7"), "llm/b": Listed("uid-b", "8"), "llm/c": Listed("another", "9")}
    assert watched.cluster.compare(PODS, listed, listed_at=101.0) == Differences({"llm/c"}, {"llm/b": "7"})


def test_an_object_that_is_no_policy_at_all_does_no_harm(watched: Watched) -> None:
    bare = {"metadata": {"name": "bare", "namespace": "llm", "uid": "uid-bare"}}
    watched.take(POLICIES, bare)
    assert watched.policy("bare").problem == ("InvalidSpec", "spec: must be a mapping of fields, not empty")
    watched.take(PODS, bare)
    assert watched.policy("bare").pods == {}
