"""What the operator may do, put in force at a real API server."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from support.kube_api import NAMESPACED_OPERATOR, OPERATOR, OPERATOR_NAMESPACE
from support.kube_client import KubeClient, Namespace

CASES = Path(__file__).parent.parent / "cases"

_PATHS = {
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "Role": "roles",
    "RoleBinding": "rolebindings",
}


async def bind_cluster_wide(client: KubeClient) -> None:
    """Let `OPERATOR` serve the whole cluster."""
    rules = _rules()
    for manifest in (*rules["cluster"], *rules["lease"]):
        await _create(client, manifest)


async def bind_to(client: KubeClient, namespace: Namespace) -> None:
    """Let `NAMESPACED_OPERATOR` serve one namespace and nothing else, with a Lease named ``namespaced``."""
    rules = _rules()
    for manifest in (*rules["namespaced"], *rules["lease"]):
        bound = copy.deepcopy(manifest)
        metadata = bound["metadata"]
        metadata["name"] += "-namespaced"
        if metadata["namespace"] == "llm":
            metadata["namespace"] = namespace.name
        for rule in bound.get("rules", ()):
            if "resourceNames" in rule:
                rule["resourceNames"] = ["namespaced"]
        if "roleRef" in bound:
            bound["roleRef"]["name"] += "-namespaced"
            bound["subjects"][0]["name"] = NAMESPACED_OPERATOR
        await _create(client, bound)


def _rules() -> Any:
    return yaml.safe_load((CASES / "rbac.yaml").read_text())


async def _create(client: KubeClient, manifest: dict[str, Any]) -> None:
    metadata = manifest["metadata"]
    for subject in manifest.get("subjects", ()):
        assert subject["name"] in (OPERATOR, NAMESPACED_OPERATOR)
        assert subject["namespace"] == OPERATOR_NAMESPACE
    within = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
    await client.create(f"/apis/rbac.authorization.k8s.io/v1{within}/{_PATHS[manifest['kind']]}", manifest)
