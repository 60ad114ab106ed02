"""What a test does at the API server, in plain JSON: make objects, set their status, read them back, be refused.

Also the kubelet that these clusters have not: `ready` and its like write what one would write of a pod.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from uuid import uuid4

import aiohttp

from support.kube_api import ADMIN, KubeApi

LIMIT_SECONDS = 30.0

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_MERGE = "application/merge-patch+json"


class RefusedError(Exception):
    """The API server said no: its HTTP status, and what it said."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"{status}: {why}")
        self.status = status


class KubeClient:
    """Requests of one user."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Any:
        headers = {"Accept": accept, **({} if body is None else {"Content-Type": content_type})}
        async with self._session.request(method, self._url + path, json=body, headers=headers) as answer:
            if answer.status >= 300:
                raise RefusedError(answer.status, await answer.text())
            return await answer.json()

    async def status(self, method: str, path: str, body: Any) -> int:
        """The HTTP status of an answer; what is patched is merged."""
        content_type = _MERGE if method == "PATCH" else "application/json"
        try:
            await self.request(method, path, body, content_type=content_type)
        except RefusedError as refused:
            return refused.status
        return 200

    async def get(self, path: str, accept: str = "application/json") -> Any:
        return await self.request("GET", path, accept=accept)

    async def create(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self.request("POST", path, body)

    async def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self.request("PATCH", path, body, content_type=_MERGE)

    async def delete(self, path: str) -> Any:
        return await self.request("DELETE", path, {"gracePeriodSeconds": 0})

    async def create_namespace(self, name: str) -> None:
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await self.create("/api/v1/namespaces", manifest)

    async def install(self, crd: Mapping[str, Any]) -> None:
        """Create a CRD and wait until its objects can be made; no effect where it is there."""
        with contextlib.suppress(RefusedError):
            await self.create(CRDS, crd)
        spec = crd["spec"]
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                with contextlib.suppress(RefusedError):
                    await self.get(f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}")
                    return
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def kube_client(api: KubeApi, user: str = ADMIN) -> AsyncIterator[KubeClient]:
    """A client for the length of the block; ``user`` is one of `kube_api`."""
    connector = aiohttp.TCPConnector(ssl=False)
    async with aiohttp.ClientSession(connector=connector, headers={"Authorization": f"Bearer {user}"}) as session:
        yield KubeClient(api.url, session)


class Namespace:
    """A namespace of a test's own, and the objects in it."""

    def __init__(self, client: KubeClient, name: str) -> None:
        self.client = client
        self.name = name

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.name}/pods"

    @property
    def policies(self) -> str:
        return f"/apis/thunderagent.io/v1alpha1/namespaces/{self.name}/thunderagentpolicies"

    @property
    def pools(self) -> str:
        return f"/apis/inference.networking.k8s.io/v1/namespaces/{self.name}/inferencepools"

    @property
    def lease(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.name}/leases/thunderagent-operator"

    async def create_policy(self, name: str = "coder", **spec: Any) -> Any:
        """A policy over the pods labelled ``app: vllm``, as far as ``spec`` says nothing else."""
        workers = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [8000]}
        return await self.client.create(
            self.policies,
            {
                "apiVersion": "thunderagent.io/v1alpha1",
                "kind": "ThunderAgentPolicy",
                "metadata": {"name": name},
                "spec": {"workers": workers, **spec},
            },
        )

    async def policy(self, name: str = "coder") -> Any:
        return await self.client.get(f"{self.policies}/{name}")

    async def patch_policy(self, name: str = "coder", **spec: Any) -> Any:
        return await self.client.patch(f"{self.policies}/{name}", {"spec": spec})

    async def delete_policy(self, name: str = "coder") -> None:
        await self.client.delete(f"{self.policies}/{name}")

    async def until_policy(self, reached: Callable[[Policy], bool], name: str = "coder") -> Policy:
        """Wait until a policy's status says it, as long as anything in a test may take."""
        seen: Policy | None = None
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while not reached(seen := Policy(await self.policy(name))):  # noqa: ASYNC110 - another process's
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not reached: {seen and seen.status}") from None
        return seen

    async def create_pod(
        self,
        name: str,
        ip: str = "127.0.0.1",
        *,
        port: int = 8000,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> Any:
        """A running pod that is ready, with one container that serves a port."""
        container = {"name": "engine", "image": "engine", "ports": [{"containerPort": port}]}
        await self.client.create(
            self.pods,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": {"app": "vllm", **(labels or {})}, "annotations": annotations},
                "spec": {"containers": [container]},
            },
        )
        return await self._pod_status(name, phase="Running", podIP=ip, conditions=[_ready("True")], **_restarts(0))

    async def set_ready(self, name: str, ready: bool) -> Any:
        """As the kubelet does when a pod's readiness changes."""
        return await self._pod_status(name, conditions=[_ready(str(ready))])

    async def restart_container(self, name: str, restarts: int = 1) -> Any:
        """As the kubelet does when it has restarted a pod's container ``restarts`` times."""
        return await self._pod_status(name, **_restarts(restarts))

    async def delete_pod(self, name: str) -> None:
        await self.client.delete(f"{self.pods}/{name}")

    async def create_pool(self, name: str, labels: Mapping[str, str], ports: list[int]) -> Any:
        return await self.client.create(
            self.pools,
            {
                "apiVersion": "inference.networking.k8s.io/v1",
                "kind": "InferencePool",
                "metadata": {"name": name},
                "spec": _pool(labels, ports),
            },
        )

    async def patch_pool(self, name: str, labels: Mapping[str, str], ports: list[int]) -> Any:
        return await self.client.patch(f"{self.pools}/{name}", {"spec": _pool(labels, ports)})

    async def delete_pool(self, name: str) -> None:
        await self.client.delete(f"{self.pools}/{name}")

    async def events(self) -> list[tuple[str, str]]:
        """Type and reason of every event, the oldest first."""
        listed = await self.client.get(f"/api/v1/namespaces/{self.name}/events")
        events = sorted(listed["items"], key=lambda one: int(one["metadata"]["resourceVersion"]))
        return [(one["type"], one["reason"]) for one in events]

    async def until_event(self, kind: str, reason: str) -> None:
        """Wait until there is such an event."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while (kind, reason) not in await self.events():  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.05)

    async def _pod_status(self, name: str, **status: Any) -> Any:
        return await self.client.patch(f"{self.pods}/{name}/status", {"status": status})


class Policy:
    """A policy as it was read once."""

    def __init__(self, body: Any) -> None:
        self.body = body
        self.status: Any = body.get("status", {})

    def condition(self, kind: str) -> tuple[str, str] | None:
        """Status and reason of a condition."""
        found = [one for one in self.status.get("conditions", ()) if one["type"] == kind]
        return (found[0]["status"], found[0]["reason"]) if found else None

    def message(self, kind: str) -> str:
        (found,) = [one for one in self.status["conditions"] if one["type"] == kind]
        return str(found["message"])

    @property
    def programmed(self) -> bool:
        return self.condition("Programmed") == ("True", "Programmed")

    @property
    def workers(self) -> str | None:
        """Live of all."""
        summary = self.status.get("workers", {}).get("summary")
        return None if summary is None else str(summary)


def _pool(labels: Mapping[str, str], ports: list[int]) -> dict[str, Any]:
    return {"selector": {"matchLabels": dict(labels)}, "targetPorts": [{"number": port} for port in ports]}


def _ready(status: str) -> dict[str, str]:
    return {"type": "Ready", "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z"}


def _restarts(count: int) -> dict[str, Any]:
    status = {"name": "engine", "image": "engine", "imageID": "engine", "ready": True, "restartCount": count}
    return {"containerStatuses": [status]}


@contextlib.asynccontextmanager
async def own_namespace(client: KubeClient) -> AsyncIterator[Namespace]:
    """A new namespace for the length of the block; emptied at the end, for nobody else does it here."""
    name = f"test-{uuid4().hex[:8]}"
    await client.create_namespace(name)
    namespace = Namespace(client, name)
    try:
        yield namespace
    finally:
        for objects in (namespace.policies, namespace.pools, namespace.pods):
            with contextlib.suppress(RefusedError):
                await client.delete(objects)
