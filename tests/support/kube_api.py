"""A real kube-apiserver and its etcd on free loopback ports, which tests may kill and start again.

There is no kubelet, scheduler or controller: a test writes a pod's status itself, and what it deletes is gone at once.
Users go by bearer token: `ADMIN` may do everything, the others what the roles say that are bound to them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from thunderagent_sim.processes import ended_with_parent

ADMIN = "admin"
OPERATOR = "thunderagent-operator"
NAMESPACED_OPERATOR = "thunderagent-operator-namespaced"
"""Tokens; of the two operators they are the names of their service accounts, in `OPERATOR_NAMESPACE`."""
OPERATOR_NAMESPACE = "thunderagent"

START_SECONDS = 60.0

ASSETS_VARIABLE = "KUBEBUILDER_ASSETS"


def missing_assets() -> str | None:
    """Why there can be no API server here; None when there can."""
    folder = os.environ.get(ASSETS_VARIABLE)
    if not folder:
        return f"{ASSETS_VARIABLE} does not name a folder with kube-apiserver and etcd"
    missing = [name for name in ("kube-apiserver", "etcd") if shutil.which(name, path=folder) is None]
    return f"there is no {' and no '.join(missing)} in {ASSETS_VARIABLE} ({folder})" if missing else None


def free_port() -> int:
    """A loopback port that was free a moment ago: neither program takes 0 and says what it got."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert isinstance(port, int)
        return port


@dataclass(slots=True)
class KubeApi:
    """An API server and its etcd, as files in ``folder`` and as processes; `running_kube_api` makes one."""

    assets: Path
    folder: Path
    port: int = field(default_factory=free_port)
    etcd_port: int = field(default_factory=free_port)
    _etcd_peer_port: int = field(default_factory=free_port)
    _server: subprocess.Popen[bytes] | None = None
    _etcd: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def etcd_url(self) -> str:
        """etcd's own interface, also its JSON one under ``/v3``."""
        return f"http://127.0.0.1:{self.etcd_port}"

    def kubeconfig(self, user: str) -> Path:
        """A kubeconfig whose context is that user's."""
        return self.folder / f"kubeconfig-{user}"

    def start(self) -> None:
        """Start what does not run and wait until the API server is ready."""
        if self._etcd is None:
            self._etcd = self._run("etcd", *self._etcd_options())
        if self._server is None:
            self._server = self._run("kube-apiserver", *self._server_options())
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            for name, process in (("etcd", self._etcd), ("kube-apiserver", self._server)):
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended with {process.returncode}: {self._last_words(name)}")
            assert time.monotonic() < deadline, f"not ready in time: {self._last_words('kube-apiserver')}"
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the API server, as a node's failure would; etcd stays."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def end(self) -> None:
        """Kill both."""
        self.kill()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()
            self._etcd = None

    def _write_files(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self.folder / "sa.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
            )
        )
        tokens = [f"{ADMIN},{ADMIN},{ADMIN},system:masters"]
        for account in (OPERATOR, NAMESPACED_OPERATOR):
            user = f"system:serviceaccount:{OPERATOR_NAMESPACE}:{account}"
            tokens.append(f'{account},{user},{account},"system:serviceaccounts,system:authenticated"')
        (self.folder / "tokens.csv").write_text("\n".join(tokens))
        for user in (ADMIN, OPERATOR, NAMESPACED_OPERATOR):
            cluster = {"server": self.url, "insecure-skip-tls-verify": True}
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "test", "cluster": cluster}],
                "users": [{"name": user, "user": {"token": user}}],
                "contexts": [{"name": user, "context": {"cluster": "test", "user": user}}],
                "current-context": user,
            }
            self.kubeconfig(user).write_text(yaml.safe_dump(config))

    def _etcd_options(self) -> tuple[str, ...]:
        peer = f"http://127.0.0.1:{self._etcd_peer_port}"
        return (
            f"--data-dir={self.folder / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={self.etcd_url}",
            f"--advertise-client-urls={self.etcd_url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )

    def _server_options(self) -> tuple[str, ...]:
        key = self.folder / "sa.key"
        return (
            f"--etcd-servers={self.etcd_url}",
            f"--cert-dir={self.folder / 'certs'}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=RBAC",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--disable-admission-plugins=ServiceAccount",
        )

    def _run(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*ended_with_parent(os.getpid()), str(self.assets / name), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _ready(self) -> bool:
        request = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": f"Bearer {ADMIN}"})
        unverified = ssl.create_default_context()
        unverified.check_hostname = False
        unverified.verify_mode = ssl.CERT_NONE
        try:
            with urllib.request.urlopen(request, timeout=5, context=unverified) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _last_words(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]


@contextlib.contextmanager
def running_kube_api(assets: Path, folder: Path) -> Iterator[KubeApi]:
    """Run both for the length of the block."""
    api = KubeApi(assets, folder)
    api._write_files()
    try:
        api.start()
        yield api
    finally:
        api.end()
