"""The few requests the operator makes to the Kubernetes API itself; watching is kopf's.

Lists of names make up for what a watch cannot tell: that a first list is complete, and what was deleted while no
watch was open; discovery tells which kinds there are to watch. Writes are two: a policy's status, and events about a
policy. Nothing here retries; the callers are level-triggered and come again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar
from uuid import uuid4

import aiohttp
import msgspec
from kubernetes.aio import client, config

from thunderagent_operator.resources import GROUP, KIND, PLURAL, VERSION

POOL_GROUP: Final = "inference.networking.k8s.io"
POOL_VERSION: Final = "v1"
POOL_PLURAL: Final = "inferencepools"

REPORTER: Final = "thunderagent-operator"

_PAGE: Final = 500
_NAMES_ONLY: Final = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json"

ApiError = (client.ApiException, aiohttp.ClientError, OSError, TimeoutError)
"""What a request can raise: the API refused it, or could not be reached."""

_TEXT_CHARACTERS_MAX: Final = 500


class _Status(msgspec.Struct):
    """How the API refuses."""

    message: str = ""


def error_text(error: BaseException) -> str:
    """What became of a request, in one line, in the API's own words where it has some: they name the right it takes."""
    if not isinstance(error, client.ApiException):
        text = f"{type(error).__name__}: {error}"
    else:
        try:
            told = msgspec.json.decode(error.body or "", type=_Status).message
        except msgspec.DecodeError:
            told = ""
        text = f"{error.status} {told or error.reason}"
    return " ".join(text.split())[:_TEXT_CHARACTERS_MAX]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of namespaced objects, by its place in the API."""

    group: str
    version: str
    plural: str

    def path(self, namespace: str | None) -> str:
        """Of the list of its objects, in one namespace or in all."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/{self.plural}" if namespace is None else f"{root}/namespaces/{namespace}/{self.plural}"


POLICIES: Final = Kind(GROUP, VERSION, PLURAL)
POOLS: Final = Kind(POOL_GROUP, POOL_VERSION, POOL_PLURAL)
PODS: Final = Kind("", "v1", "pods")


class Listed(NamedTuple):
    """Which object a list found under a name, and as of which of its changes."""

    uid: str
    version: str


class _Named(msgspec.Struct):
    name: str


class _Version(msgspec.Struct):
    version: str


class _Group(msgspec.Struct):
    name: str
    versions: list[_Version]


class _Groups(msgspec.Struct):
    groups: list[_Group]


class _Resources(msgspec.Struct):
    resources: list[_Named]


class _Metadata(msgspec.Struct):
    name: str
    namespace: str
    uid: str
    version: str = msgspec.field(default="", name="resourceVersion")


class _Object(msgspec.Struct):
    metadata: _Metadata


class _PageMetadata(msgspec.Struct):
    next: str | None = msgspec.field(default=None, name="continue")


class _Page(msgspec.Struct):
    metadata: _PageMetadata
    items: list[_Object] | None = None


_Answer = TypeVar("_Answer")


async def connect() -> client.ApiClient:
    """A client for the cluster this runs in, else for the one of the user's kubeconfig.

    Raises kubernetes.aio.config.ConfigException when there is neither.
    """
    configuration = client.Configuration()
    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
    else:
        await config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=configuration)  # type: ignore[no-untyped-call]
    return client.ApiClient(configuration)


class Api:
    """Requests to the API, with ``timeout_seconds`` (> 0) for each."""

    def __init__(self, api: client.ApiClient, timeout_seconds: float = 30.0) -> None:
        self._api = api
        self._timeout_seconds = timeout_seconds

    async def served(self, kinds: Collection[Kind]) -> set[Kind]:
        """Those of ``kinds``, none of the core group, that the API has by what kopf goes by too. Raises ApiError."""
        groups = {group.name: group for group in (await self._get("/apis", _Groups)).groups}
        found = set()
        for kind in kinds:
            versions = groups[kind.group].versions if kind.group in groups else ()
            if all(version.version != kind.version for version in versions):
                continue
            try:
                listed = await self._get(f"/apis/{kind.group}/{kind.version}", _Resources)
            except client.ApiException as error:
                if error.status != 404:
                    raise
            else:
                found |= {kind for resource in listed.resources if resource.name == kind.plural}
        return found

    async def names(self, kind: Kind, namespace: str | None, label_selector: str = "") -> dict[str, Listed]:
        """Every object of a kind by ``namespace/name``. Raises ApiError, also where the kind is not there."""
        found: dict[str, Listed] = {}
        query: dict[str, str] = {"limit": str(_PAGE)}
        if label_selector:
            query["labelSelector"] = label_selector
        while True:
            page = await self._get(kind.path(namespace), _Page, query=query, accept=_NAMES_ONLY)
            for metadata in (item.metadata for item in page.items or ()):
                found[f"{metadata.namespace}/{metadata.name}"] = Listed(metadata.uid, metadata.version)
            if not page.metadata.next:
                return found
            query["continue"] = page.metadata.next

    async def patch_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Put a policy's status in place of what is there; a policy that is gone has none. Raises ApiError."""
        # A merge patch leaves fields alone that it does not name; null is what takes one away.
        given = {field: status.get(field) for field in _STATUS_FIELDS}
        try:
            await self._request(
                "PATCH",
                f"{POLICIES.path(namespace)}/{name}/status",
                body={"status": given},
                content_type="application/merge-patch+json",
            )
        except client.ApiException as error:
            if error.status != 404:
                raise

    async def event(self, policy: Mapping[str, Any], *, reason: str, message: str, warning: bool) -> None:
        """Record an event on a policy, given as the API gave it. Raises ApiError."""
        metadata = policy["metadata"]
        now = datetime.now(UTC)
        body = {
            "metadata": {"name": f"{metadata['name'][:200]}.{uuid4().hex[:16]}", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message[:1024],
            "source": {"component": REPORTER},
            "reportingComponent": REPORTER,
            "reportingInstance": os.environ.get("POD_NAME", REPORTER),
            "action": "Reconcile",
            "firstTimestamp": now.isoformat(timespec="seconds"),
            "lastTimestamp": now.isoformat(timespec="seconds"),
            "count": 1,
        }
        await self._request("POST", f"/api/v1/namespaces/{metadata['namespace']}/events", body=body)

    async def _get(
        self,
        path: str,
        of: type[_Answer],
        *,
        query: Mapping[str, str] | None = None,
        accept: str = "application/json",
    ) -> _Answer:
        content = await self._request("GET", path, query=query, accept=accept)
        try:
            return msgspec.json.decode(content, type=of)
        except msgspec.DecodeError as error:
            # A proxy before the API may answer for it.
            raise client.ApiException(status=200, reason=f"{path} answers what the API would not: {error}") from None

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        accept: str = "application/json",
        content_type: str = "application/json",
    ) -> bytes:
        request = await self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": accept, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        response = await self._api.call_api(*request, _request_timeout=self._timeout_seconds)
        content: bytes = await response.read()  # type: ignore[no-untyped-call]
        if not 200 <= response.status < 300:
            raise client.ApiException(http_resp=response, body=content.decode(errors="replace"))
        return content


_STATUS_FIELDS: Final = (
    "observedGeneration",
    "conditions",
    "workers",
    "capacityTokens",
    "snapshot",
    "pickers",
)
