"""The cluster of the operator's benchmark: a real API server with policies and worker pods, and the workers' answers.

There is no kubelet here: pods are written as one would leave them, with a spec and a status of the size that vLLM
deployments have. Each has an address of its own in 127.0.0.0/8, all of which one listener serves, so that thousands of
workers can be probed over HTTP on one machine.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from thunderagent_operator.crd import crd_yaml

POLICIES_PATH = "/apis/thunderagent.io/v1alpha1"
WRITES_AT_ONCE = 48
ZERO_TIME = "2026-01-01T00:00:00Z"

NAMESPACES = ("by-app", "by-model", "by-expression", "by-name")

METRICS = (
    "# TYPE vllm:cache_config_info gauge\n"
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",kv_cache_size_tokens="1188352",'
    'num_cpu_blocks="None",num_gpu_blocks="74272"} 1.0\n'
    + "".join(
        f"# HELP vllm:{name} One of the histograms that every vLLM shows.\n# TYPE vllm:{name} histogram\n"
        + "".join(
            f'vllm:{name}_bucket{{engine="0",le="{bound}",model_name="meta-llama/Llama-3.1-70B-Instruct"}} 0.0\n'
            for bound in (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, "+Inf")
        )
        for name in (f"measure_{number}_seconds" for number in range(20))
    )
)
CAPACITY_TOKENS = 1188352


@dataclass(frozen=True, slots=True)
class WorkerPod:
    """One worker pod and the policy that selects it, both by name within ``namespace``."""

    namespace: str
    policy: str
    name: str
    labels: Mapping[str, str]
    ip: str


def selector_of(namespace: str, model: str) -> dict[str, Any]:
    """A scheme per namespace: with no label in common, the API server cannot filter pods for the operator."""
    match namespace:
        case "by-app":
            return {"matchLabels": {"app": model}}
        case "by-model":
            return {"matchLabels": {"llm-d.ai/model": model, "llm-d.ai/role": "decode"}}
        case "by-expression":
            return {"matchExpressions": [{"key": "serving", "operator": "In", "values": [model, f"{model}-canary"]}]}
        case _:
            return {"matchLabels": {"app.kubernetes.io/name": "vllm", "app.kubernetes.io/instance": model}}


def labels_of(namespace: str, model: str, number: int) -> dict[str, str]:
    """Labels that the selector of the same model selects."""
    common = {"pod-template-hash": "6c8f7d9b5", "team": namespace}
    match namespace:
        case "by-app":
            return common | {"app": model}
        case "by-model":
            return common | {"llm-d.ai/model": model, "llm-d.ai/role": "decode"}
        case "by-expression":
            return common | {"serving": model if number % 5 else f"{model}-canary"}
        case _:
            return common | {"app.kubernetes.io/name": "vllm", "app.kubernetes.io/instance": model}


def worker_pods(policies: int, pods_each: int) -> list[WorkerPod]:
    """All of them, a policy's ones next to each other."""
    found: list[WorkerPod] = []
    for policy in range(policies):
        namespace, model = NAMESPACES[policy % len(NAMESPACES)], f"model-{policy:03}"
        for number in range(pods_each):
            at = len(found)
            ip = f"127.{10 + at // 62_500}.{at // 250 % 250}.{at % 250 + 1}"
            name = f"{model}-6c8f7d9b5-{number:05}"
            found.append(WorkerPod(namespace, model, name, labels_of(namespace, model, number), ip))
    return found


def policy_object(namespace: str, name: str, port: int) -> dict[str, Any]:
    return {
        "apiVersion": "thunderagent.io/v1alpha1",
        "kind": "ThunderAgentPolicy",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"workers": {"selector": selector_of(namespace, name), "targetPorts": [port]}},
    }


def pod_object(pod: WorkerPod, port: int) -> dict[str, Any]:
    """As a Deployment of vLLM would have it."""
    probe = {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 10, "failureThreshold": 3}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod.name,
            "namespace": pod.namespace,
            "labels": dict(pod.labels),
            "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)},
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": f"{pod.policy}-6c8f7d9b5", "controller": True,
                 "uid": "11111111-2222-3333-4444-555555555555"}
            ],
        },
        "spec": {
            "nodeName": f"gpu-node-{pod.name[-3:]}",
            "containers": [
                {
                    "name": "vllm",
                    "image": "vllm/vllm-openai:v0.11.0",
                    "args": ["--model", pod.policy, "--tensor-parallel-size", "8", "--max-model-len", "131072"],
                    "env": [{"name": f"VLLM_SETTING_{number}", "value": "some value"} for number in range(12)],
                    "ports": [{"containerPort": port, "name": "http"}],
                    "resources": {"limits": {"nvidia.com/gpu": "8", "memory": "256Gi"}, "requests": {"cpu": "32"}},
                    "volumeMounts": [
                        {"name": "shm", "mountPath": "/dev/shm"}, {"name": "cache", "mountPath": "/root/.cache"}
                    ],
                    "startupProbe": probe,
                    "readinessProbe": probe,
                    "livenessProbe": probe,
                }
            ],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "cache", "emptyDir": {}}],
        },
    }  # fmt: skip


def pod_status(pod: WorkerPod, *, ready: bool, at: str = ZERO_TIME) -> dict[str, Any]:
    """As a kubelet would write it."""
    state = "True" if ready else "False"
    return {
        "phase": "Running",
        "hostIP": "10.1.2.3",
        "podIP": pod.ip,
        "podIPs": [{"ip": pod.ip}],
        "startTime": ZERO_TIME,
        "qosClass": "Burstable",
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": ZERO_TIME},
            {"type": "PodReadyToStartContainers", "status": "True", "lastTransitionTime": ZERO_TIME},
            {"type": "Initialized", "status": "True", "lastTransitionTime": ZERO_TIME},
            {"type": "ContainersReady", "status": state, "lastTransitionTime": at},
            {"type": "Ready", "status": state, "lastTransitionTime": at},
        ],
        "containerStatuses": [
            {
                "name": "vllm",
                "image": "vllm/vllm-openai:v0.11.0",
                "imageID": f"docker.io/vllm/vllm-openai@sha256:{'a' * 64}",
                "containerID": f"containerd://{'b' * 64}",
                "ready": ready,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": ZERO_TIME}},
            }
        ],
    }


class Writer:
    """Writes objects to the API server as fast as it takes them, and counts them for ``wrote``."""

    def __init__(self, client: aiohttp.ClientSession, wrote: Callable[[], None]) -> None:
        self._client = client
        self._wrote = wrote

    async def create_cluster(self, pods: list[WorkerPod], port: int) -> None:
        """Namespaces, the CRD, every policy and every pod."""
        for name in NAMESPACES:
            await self._send("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        definition = yaml.safe_load(crd_yaml())
        await self._send("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        await self._until_served(f"{POLICIES_PATH}/thunderagentpolicies")
        policies = dict.fromkeys((pod.namespace, pod.policy) for pod in pods)
        await self._all(self._create_policy(namespace, name, port) for namespace, name in policies)
        await self._all(self._create_pod(pod, port) for pod in pods)

    async def write_readiness(self, pod: WorkerPod, ready: bool, at: str) -> None:
        """Change a pod as the kubelet does when its readiness probe changes its mind."""
        await self._send(
            "PATCH",
            f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status",
            {"status": pod_status(pod, ready=ready, at=at)},
        )

    async def policies(self) -> list[dict[str, Any]]:
        """Every policy as it is now."""
        async with self._client.get(f"{POLICIES_PATH}/thunderagentpolicies") as answer:
            items: list[dict[str, Any]] = (await answer.json())["items"]
            return items

    async def _create_policy(self, namespace: str, name: str, port: int) -> None:
        path = f"{POLICIES_PATH}/namespaces/{namespace}/thunderagentpolicies"
        await self._send("POST", path, policy_object(namespace, name, port))
        self._wrote()

    async def _create_pod(self, pod: WorkerPod, port: int) -> None:
        await self._send("POST", f"/api/v1/namespaces/{pod.namespace}/pods", pod_object(pod, port))
        await self.write_readiness(pod, True, ZERO_TIME)
        self._wrote()

    async def _all(self, writes: Iterable[Awaitable[None]]) -> None:
        """Run all of them, so many at once."""
        waiting: Iterator[Awaitable[None]] = iter(writes)

        async def write() -> None:
            for one in waiting:
                await one

        async with asyncio.TaskGroup() as tasks:
            for _ in range(WRITES_AT_ONCE):
                tasks.create_task(write())

    async def _send(self, method: str, path: str, body: dict[str, Any]) -> None:
        kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        async with self._client.request(method, path, json=body, headers={"Content-Type": kind}) as answer:
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {(await answer.text())[:300]}")
            await answer.read()

    async def _until_served(self, path: str) -> None:
        for _ in itertools.repeat(None, 200):
            async with self._client.get(path) as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{path} is not served")


def client_of(kubeconfig: Path) -> aiohttp.ClientSession:
    """A client with the kubeconfig's address and token."""
    config = yaml.safe_load(kubeconfig.read_text())
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    return aiohttp.ClientSession(
        config["clusters"][0]["cluster"]["server"],
        headers={"Authorization": f"Bearer {config['users'][0]['user']['token']}"},
        connector=aiohttp.TCPConnector(ssl=unverified, limit=0),
    )


class WorkerAnswers(asyncio.Protocol):
    """Answers every request with the metrics of a vLLM, whatever it asks for."""

    answer = (
        f"HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\ncontent-length: {len(METRICS)}\r\n"
        f"connection: close\r\n\r\n{METRICS}"
    ).encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"\r\n\r\n"):
            self._transport.write(self.answer)
            self._transport.close()
