"""What tests of several folders share: a real Kubernetes API, and an operator that serves the whole of it.

Both are started once, for each takes seconds; tests keep apart by namespaces. So these tests and fixtures are in one
event loop, that of the session.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.kube_api import ASSETS_VARIABLE, OPERATOR, OPERATOR_NAMESPACE, KubeApi, missing_assets, running_kube_api
from support.kube_client import KubeClient, Namespace, kube_client, own_namespace
from support.operator_process import OperatorProcess, running_operator
from support.operator_roles import bind_cluster_wide
from thunderagent_operator.crd import crd


@pytest.fixture(scope="session")
def kube_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApi]:
    """A real API server; a test that kills it starts it again."""
    if reason := missing_assets():
        pytest.skip(reason)
    with running_kube_api(Path(os.environ[ASSETS_VARIABLE]), tmp_path_factory.mktemp("kube")) as api:
        yield api


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def kube(kube_api: KubeApi) -> AsyncIterator[KubeClient]:
    """The cluster's admin; the ThunderAgentPolicy CRD is installed and the operator's roles are bound."""
    async with kube_client(kube_api) as client:
        await client.install(crd())
        await client.create_namespace(OPERATOR_NAMESPACE)
        await bind_cluster_wide(client)
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def namespace(kube: KubeClient) -> AsyncIterator[Namespace]:
    """A namespace of the test's own."""
    async with own_namespace(kube) as own:
        yield own


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def operator(kube_api: KubeApi, kube: KubeClient) -> AsyncIterator[OperatorProcess]:
    """An operator that serves the whole cluster, with the rights it has from the chart and no other."""
    async with running_operator(kube_api.kubeconfig(OPERATOR), "--lease-namespace", OPERATOR_NAMESPACE) as running:
        await running.until_serving()
        yield running
        assert running.troubles == []
