"""Every YAML block a reader might copy is one that would be taken, and every link leads somewhere."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from chart_files import values_schema
from support.manifests import faults
from support.markdown import PAGES, ROOT, Block, anchors, blocks, links
from thunderagent_epp.feed.policy_file import load_policy_file
from thunderagent_sim.fleet.service import load_service

YAML = blocks("yaml")


def documents(block: Block) -> list[Any]:
    return [document for document in yaml.safe_load_all(block.text) if document]


def is_manifest(document: dict[str, Any]) -> bool:
    return {"apiVersion", "kind"} <= document.keys()


def is_values(document: dict[str, Any]) -> bool:
    return document.keys() <= values_schema()["properties"].keys()


def is_simulated_engine(document: dict[str, Any]) -> bool:
    return "prefill_token_seconds" in document


@pytest.mark.parametrize("block", YAML, ids=str)
def test_a_block_of_yaml_would_be_taken(block: Block, tmp_path: Path) -> None:
    for document in documents(block):
        if is_manifest(document):
            assert faults(document) == []
        elif is_values(document):
            errors = Draft7Validator(values_schema()).iter_errors(document)
            assert [f"{error.json_path}: {error.message}" for error in errors] == []
        else:
            file = tmp_path / "file.yaml"
            file.write_text(block.text)
            if is_simulated_engine(document):
                load_service(file)
            else:
                assert load_policy_file(file).workers


def test_there_is_something_to_check() -> None:
    kinds = {document["kind"] for block in YAML for document in documents(block) if is_manifest(document)}
    assert {"ThunderAgentPolicy", "HTTPRoute", "Gateway", "DestinationRule", "Deployment", "PrometheusRule"} <= kinds


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "gateways"], ids=lambda page: page.stem)
def test_a_route_leads_to_the_gateway_and_the_pool_of_its_page(page: Path) -> None:
    found = [document for block in YAML if block.page == page for document in documents(block)]
    gateways = {one["metadata"]["name"] for one in found if one.get("kind") == "Gateway"}
    pools = {pool["name"] for one in found for pool in one.get("pools", [])}
    for route in (one for one in found if one.get("kind") == "HTTPRoute"):
        assert {parent["name"] for parent in route["spec"]["parentRefs"]} <= gateways
        assert {backend["name"] for rule in route["spec"]["rules"] for backend in rule["backendRefs"]} <= pools


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), link
        if anchor:
            assert anchor in anchors(there), link
