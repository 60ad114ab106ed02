"""Whether a Kubernetes object is what its kind's schema says: core kinds by the API's own, ours by its CRD.

For kinds of others there is no schema at hand; of those it is known which fields a spec may have, which finds a
misspelt one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import kubernetes_validate

from support.structural_schema import refusals
from thunderagent_operator.crd import crd

KUBERNETES_VERSIONS = ("1.33", "1.37")

_ROUTE_KINDS = {"InferencePool", "Service"}

THIRD_PARTY: dict[tuple[str, str], tuple[Collection[str], Collection[str]]] = {
    ("inference.networking.k8s.io/v1", "InferencePool"): (
        {"selector", "targetPorts", "endpointPickerRef"},
        {"appProtocol"},
    ),
    ("gateway.networking.k8s.io/v1", "GatewayClass"): ({"controllerName"}, {"parametersRef", "description"}),
    ("gateway.networking.k8s.io/v1", "Gateway"): ({"gatewayClassName", "listeners"}, {"infrastructure", "addresses"}),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): ({"parentRefs", "rules"}, {"hostnames"}),
    ("gateway.envoyproxy.io/v1alpha1", "ClientTrafficPolicy"): (
        {"targetRefs"},
        {"timeout", "headers", "connection", "http1", "http2", "tcpKeepalive"},
    ),
    ("gateway.envoyproxy.io/v1alpha1", "BackendTrafficPolicy"): (
        {"targetRefs"},
        {"timeout", "circuitBreaker", "retry", "tcpKeepalive", "connection"},
    ),
    ("gateway.envoyproxy.io/v1alpha1", "EnvoyPatchPolicy"): ({"targetRef", "type", "jsonPatches"}, {"priority"}),
    ("networking.istio.io/v1", "DestinationRule"): ({"host", "trafficPolicy"}, {"exportTo", "subsets"}),
    ("networking.istio.io/v1alpha3", "EnvoyFilter"): ({"configPatches"}, {"workloadSelector", "targetRefs"}),
    ("networking.gke.io/v1", "GCPBackendPolicy"): ({"targetRef", "default"}, ()),
    ("networking.gke.io/v1", "HealthCheckPolicy"): ({"targetRef", "default"}, ()),
    ("cert-manager.io/v1", "Issuer"): ((), {"selfSigned", "ca"}),
    ("cert-manager.io/v1", "ClusterIssuer"): ((), {"selfSigned", "ca"}),
    ("cert-manager.io/v1", "Certificate"): (
        {"secretName", "issuerRef"},
        {"isCA", "commonName", "dnsNames", "ipAddresses", "usages", "duration", "renewBefore", "privateKey"},
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): ({"selector", "podMetricsEndpoints"}, {"podTargetLabels"}),
    ("monitoring.coreos.com/v1", "PrometheusRule"): ({"groups"}, ()),
}
"""Of each kind the fields its spec must have and those it may."""


def faults(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with an object; empty when nothing is known to be."""
    kind = manifest["apiVersion"], manifest["kind"]
    if kind[1] == "CustomResourceDefinition":
        return [] if manifest == crd() | {"metadata": manifest["metadata"]} else ["not the CRD of this version"]
    if kind[0].startswith("thunderagent.io/"):
        return refusals(crd(), manifest)
    if kind in THIRD_PARTY:
        return _third_party(manifest, *THIRD_PARTY[kind])
    found = []
    for version in KUBERNETES_VERSIONS:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            found.append(f"{version}: {str(error).splitlines()[0]}")
    return found


def _third_party(manifest: dict[str, Any], needed: Collection[str], allowed: Collection[str]) -> list[str]:
    spec = manifest["spec"]
    found = [f"spec.{name} is missing" for name in needed if name not in spec]
    found += [f"spec.{name} is unknown" for name in spec if name not in {*needed, *allowed}]
    if manifest["kind"] == "InferencePool":
        found += _inference_pool(spec)
    if manifest["kind"] == "HTTPRoute":
        found += [
            f"a backend of kind {backend.get('kind')}"
            for rule in spec["rules"]
            for backend in rule["backendRefs"]
            if backend.get("kind", "Service") not in _ROUTE_KINDS
        ]
    return found


def _inference_pool(spec: dict[str, Any]) -> list[str]:
    """As the InferencePool CRD of the Inference Extension v1 has it."""
    found = []
    if list(spec["selector"]) != ["matchLabels"] or not spec["selector"]["matchLabels"]:
        found.append("spec.selector must have matchLabels and nothing else")
    if not 1 <= len(spec["targetPorts"]) <= 8 or any(list(port) != ["number"] for port in spec["targetPorts"]):
        found.append("spec.targetPorts must be 1 to 8 numbers")
    picker = spec["endpointPickerRef"]
    if not {"name", "port"} <= set(picker) <= {"group", "kind", "name", "port", "failureMode"}:
        found.append("spec.endpointPickerRef must have name and port")
    if picker.get("failureMode", "FailClose") not in ("FailOpen", "FailClose"):
        found.append("spec.endpointPickerRef.failureMode must be FailOpen or FailClose")
    return found
