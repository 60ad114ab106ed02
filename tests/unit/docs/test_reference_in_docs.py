"""The tables of the documentation name every field, metric and refusal there is, and none that is not."""

import re
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from support.markdown import ROOT, blocks, rows
from thunderagent_epp.extproc.errors import Refusal, Refused, refusal_answer
from thunderagent_epp.telemetry.metrics import Metrics
from thunderagent_epp.telemetry.status import Gauges
from thunderagent_operator.crd import crd
from thunderagent_operator.telemetry import OperatorMetrics, ProbeMetrics


def code(cell: str) -> str:
    """What is in backticks in a cell, empty where there is nothing."""
    found = re.match(r"`([^`]*)`", cell)
    return found[1] if found else ""


def fields(schema: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Every field of a schema that has no fields itself, with its default."""
    found: dict[str, Any] = {}
    for name, field in schema["properties"].items():
        at = f"{path}{name}"
        if "properties" in field:
            found |= fields(field, f"{at}.")
        else:
            found[at] = field.get("default")
    return found


def plain(default: Any) -> str:
    """A default as the table writes it; one that is left out there has none of its own."""
    match default:
        case None:
            return ""
        case float():
            return f"{default:g}"
        case _:
            return str(default)


def same(written: str, default: Any) -> bool:
    if isinstance(default, float):
        return bool(written) and float(written) == default
    return written == plain(default)


def test_every_field_of_a_policy_is_described_with_its_default() -> None:
    (version,) = crd()["spec"]["versions"]
    there = fields(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    described = {code(row[0]): code(row[1]) for row in rows("policy.md") if len(row) == 5 and code(row[0])}
    assert described.keys() == there.keys()
    wrong = {name: described[name] for name, default in there.items() if not same(described[name], default)}
    # Of these an absent one and an empty one are the same.
    assert {name for name in wrong if there[name] not in ([], {})} == set()


def exported(registry: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and labels of everything of this project in a registry, by the name a query uses."""
    found = {}
    for collector in list(registry._collector_to_names):
        found |= {name: (kind, labels) for name, kind, labels in of_collector(collector)}
    return {name: said for name, said in found.items() if name.startswith("thunderagent_")}


def of_collector(collector: Collector) -> list[tuple[str, str, tuple[str, ...]]]:
    if hasattr(collector, "_labelnames"):
        (family,) = collector.describe()
        families = [(family, tuple(collector._labelnames))]
    else:
        families = [(family, tuple(getattr(family, "_labelnames", ()))) for family in collector.collect()]
    suffix = {"counter": "_total"}
    return [(family.name + suffix.get(family.type, ""), family.type, labels) for family, labels in families]


def described(heading: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The table of metrics.md under a heading."""
    listed: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {}
    section = ""
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `"):
            name, kind, labels, *_ = (cell.strip() for cell in line.split("|")[1:-1])
            listed.setdefault(section, {})[code(name)] = (kind, tuple(re.findall(r"`([^`]*)`", labels)))
    return listed[heading]


def picker_metrics() -> CollectorRegistry:
    metrics = Metrics()
    metrics.watch(Gauges)
    metrics.watch_feed(lambda: True, lambda: 0)
    return metrics.registry


def test_every_metric_of_the_picker_is_described() -> None:
    assert described("Picker") == exported(picker_metrics())


def test_every_metric_of_the_operator_is_described() -> None:
    registry = CollectorRegistry(auto_describe=True)
    OperatorMetrics(registry)
    ProbeMetrics(registry)
    assert described("Operator") == exported(registry)


def test_alerts_ask_for_metrics_that_are_there() -> None:
    there = described("Picker") | described("Operator")
    (rules,) = [block.text for block in blocks("yaml") if "PrometheusRule" in block.text]
    asked = set(re.findall(r"\b(thunderagent_[a-z_]+?)(?:_bucket|_sum|_count)?\b(?=[^a-z_]|$)", rules))
    assert asked - {"thunderagent_io_pool"} <= there.keys()


def test_every_refusal_is_described_with_its_status_and_retry_after() -> None:
    listed = {code(row[0]): (row[1], row[3]) for row in rows("refusals.md") if code(row[0])}
    assert listed.keys() == {code.value for code in Refusal}
    for refusal in Refusal:
        answer = refusal_answer(Refused(refusal), "/v1/completions")
        status, retry_after = listed[refusal.value]
        assert status == str(answer.status)
        if refusal is not Refusal.HOLD_TIMEOUT:  # that one says the policy's interval
            assert retry_after == answer.headers.get("retry-after", "")
