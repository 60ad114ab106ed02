"""Objects as the Kubernetes API gives them, for tests without an API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMESPACE = "llm"


def policy_object(
    name: str = "coder", *, uid: str | None = None, version: str = "1", generation: int = 1, **spec: Any
) -> dict[str, Any]:
    """A policy over the pods labelled ``app: vllm``, as far as ``spec`` says nothing else."""
    workers = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [8000]}
    return {
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": uid or f"uid-{name}",
            "resourceVersion": version,
            "generation": generation,
        },
        "spec": {"workers": workers, **spec},
    }


def pool_object(
    name: str = "coder", labels: Mapping[str, str] | None = None, ports: tuple[int, ...] = (8000,)
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "resourceVersion": "1"},
        "spec": {
            "selector": {"matchLabels": dict(labels or {"app": "vllm"})},
            "targetPorts": [{"number": port} for port in ports],
        },
    }


def pod_object(
    name: str = "a",
    *,
    uid: str | None = None,
    version: str = "1",
    labels: Mapping[str, str] | None = None,
    ready: bool = True,
    ip: str = "10.0.0.1",
) -> dict[str, Any]:
    """A running pod with one container that serves port 8000, and more of an object than anybody looks at."""
    return {
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": uid or f"uid-{name}",
            "resourceVersion": version,
            "labels": dict({"app": "vllm"} if labels is None else labels),
            "managedFields": [{"manager": "kubelet"}],
        },
        "spec": {
            "nodeName": "node",
            "containers": [
                {"name": "engine", "image": "engine", "ports": [{"containerPort": 8000, "protocol": "TCP"}]}
            ],
        },
        "status": {
            "phase": "Running",
            "podIP": ip,
            "hostIP": "10.1.0.1",
            "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:00Z"},
            ],
            "containerStatuses": [{"name": "engine", "restartCount": 0, "imageID": "engine"}],
        },
    }
