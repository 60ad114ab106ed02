"""The files of the charts that follow from the code: ``make chart`` writes them, a test fails when one has drifted.

* ``values.schema.json``: what a user may set. A policy's part is the CRD's schema, and so has the bounds of
  `policy.py`. Helm checks values against it before it renders anything, and names the value at fault.
* ``files/envoy.yaml``: the output of ``thunderagent envoy-config``, for pools in standalone mode.
* The CRD: in ``crds/`` of the chart, and in the chart that upgrades it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from thunderagent_epp.envoy_config import EnvoyOptions, bootstrap, render_yaml
from thunderagent_operator.crd import CRD_FILE_NAME, crd, crd_yaml

CHARTS: Final = Path(__file__).parent

Schema = dict[str, Any]

_DNS_LABEL: Final = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"


def files() -> dict[Path, str]:
    """Every generated file with its content; paths are relative to ``charts/``."""
    return {
        Path("thunderagent/values.schema.json"): json.dumps(values_schema(), indent=2, ensure_ascii=False) + "\n",
        Path("thunderagent/files/envoy.yaml"): render_yaml(bootstrap(EnvoyOptions(access_log=True))),
        Path("thunderagent/crds", CRD_FILE_NAME): crd_yaml(),
        Path("thunderagent-crds/files", CRD_FILE_NAME): crd_yaml(),
    }


def values_schema() -> Schema:
    """JSON schema (draft 7) of the chart's values; every object but those of Kubernetes' own kinds is closed."""
    settings = _picker_settings()
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the thunderagent chart",
        **_object(
            {
                "nameOverride": _text("Name of the chart in labels and names."),
                "fullnameOverride": _text("Prefix of every object's name; of the release by default."),
                "commonLabels": _labels("Added to every object and pod."),
                "runAsUser": {
                    "type": ["integer", "null"],
                    "minimum": 1,
                    "description": "User and group of every pod; null where the cluster chooses them (OpenShift).",
                },
                "clusterDomain": _text("The cluster's DNS domain, for names in certificates.", minLength=1),
                "image": _object(
                    {
                        "repository": _text("Image without tag.", minLength=1),
                        "tag": _text("The chart's appVersion when empty."),
                        "digest": _text("sha256:…; comes before the tag.", pattern="^(sha256:[0-9a-f]{64})?$"),
                        "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
                    }
                ),
                "imagePullSecrets": {"type": "array", "items": _foreign("A LocalObjectReference.")},
                "pools": {
                    "type": "array",
                    "description": "One endpoint picker per entry.",
                    "items": _object({**settings, **_pool()}, required=["name"]),
                },
                "epp": _object(settings),
                "operator": _operator(),
                "feed": _object(
                    {
                        "address": _text(
                            "HOST:PORT of another release's operator, with operator.enabled false.",
                            pattern="^(([^\\s/:\\[\\]]+|\\[[0-9A-Fa-f:.]+\\]):[0-9]{1,5})?$",
                        )
                    }
                ),
                "tls": _tls(),
                "networkPolicy": _object(
                    {
                        "enabled": _flag("Say who may talk to what."),
                        "gateways": _peers("Who may ask the picker; empty: any pod."),
                        "monitoring": _peers("Who may read /metrics and /state; empty: any pod."),
                        "clients": _peers("Who may use the standalone Envoy; empty: anybody."),
                        "apiServerPorts": {
                            "type": "array",
                            "description": "Ports of the Kubernetes API.",
                            "minItems": 1,
                            "items": _port(),
                        },
                    }
                ),
                "podMonitor": _object(
                    {
                        "enabled": _flag("Make PodMonitors (monitoring.coreos.com/v1)."),
                        "interval": _text("Time between scrapes.", pattern="^([0-9]+(ms|s|m|h))+$"),
                        "labels": _labels("Those your Prometheus selects by."),
                    }
                ),
                "standalone": _object(_standalone()),
                "crds": _object({"check": _flag("Refuse to install beside a CRD that lacks fields of this version.")}),
                "global": _foreign("Of a parent chart; not used."),
            }
        ),
    }


def policy_schema() -> Schema:
    """The spec of a ThunderAgentPolicy as JSON schema; ``workers`` may be left out, where the chart makes the pool."""
    structural = _spec_of_the_crd()
    # A map of any names in the CRD, where a rule in CEL refuses each.
    del structural["properties"]["selection"]
    spec = _closed(structural)
    spec["properties"]["selection"] = {"type": "object", "maxProperties": 0, "description": "Takes no parameters."}
    del spec["required"]
    return spec


def _spec_of_the_crd() -> Schema:
    (version,) = crd()["spec"]["versions"]
    spec: Schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return spec


def _picker_settings() -> dict[str, Schema]:
    """What both `epp` and an entry of `pools` have."""
    return {
        "replicas": {
            "type": "integer",
            "minimum": 0,
            "description": "Each counts only the programs it sees, against all of the capacity.",
        },
        "plaintext": _flag("No TLS on the picker's port."),
        "maxBodyBytes": {"type": "integer", "minimum": 1, "description": "Larger request bodies are refused."},
        "maxHeldBytes": {
            "type": "integer",
            "minimum": 1,
            "description": "Most bytes of bodies held at once; keep it well below the memory limit.",
        },
        "drainDelaySeconds": {
            "type": "number",
            "minimum": 0,
            "description": "Seconds from SIGTERM until requests are refused.",
        },
        "drainTimeoutSeconds": {
            "type": "number",
            "minimum": 0,
            "description": "Seconds that running answers are then given.",
        },
        "service": _object({"annotations": _labels("Of the picker's Service.")}),
        **_component(),
    }


def _component() -> dict[str, Schema]:
    return {
        "logLevel": _text("debug, info, warning or error, and parts with their own: info,scheduling=debug."),
        "resources": _foreign("ResourceRequirements of the container."),
        "extraArgs": {
            "type": "array",
            "description": "Further options of the command.",
            "items": {"type": "string", "pattern": "^--"},
        },
        "extraEnv": {"type": "array", "items": _foreign("An EnvVar.")},
        "podDisruptionBudget": _object(
            {
                "enabled": _flag("Make a PodDisruptionBudget."),
                "maxUnavailable": {
                    "anyOf": [
                        {"type": "integer", "minimum": 0},
                        {"type": "string", "pattern": "^(100|[1-9]?[0-9])%$"},
                    ],
                    "description": "Pods that may be evicted at once.",
                },
            }
        ),
        "podAnnotations": _labels("Of the pods."),
        "podLabels": _labels("Of the pods."),
        "nodeSelector": _labels("Labels of the nodes to run on."),
        "tolerations": {"type": "array", "items": _foreign("A Toleration.")},
        "affinity": _foreign("An Affinity."),
        "priorityClassName": _text("Name of a PriorityClass."),
    }


def _pool() -> dict[str, Schema]:
    workers = _spec_of_the_crd()["properties"]["workers"]["properties"]
    return {
        "name": _text("Of the InferencePool, and in the names of the picker's objects.", pattern=_DNS_LABEL),
        "namespace": _text("Where the workers are; the release's own by default.", pattern="^([a-z0-9-]*)$"),
        "inferencePool": _object(
            {
                "create": _flag("Make an InferencePool; default true, false in standalone mode."),
                "selector": _closed(workers["selector"]["properties"]["matchLabels"]),
                "targetPorts": _closed(workers["targetPorts"]) | {"minItems": 0, "uniqueItems": True},
                "failureMode": {
                    "enum": ["FailClose", "FailOpen"],
                    "description": "Without a picker: FailClose answers 503, FailOpen takes any worker.",
                },
            }
        ),
        "policy": _object(
            {
                "create": _flag("Make a ThunderAgentPolicy; false: follow one that is there."),
                "name": _text("The entry's name by default.", pattern="^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$"),
                "spec": policy_schema(),
            }
        ),
        "standalone": _object({"enabled": _flag("Run an Envoy beside the picker."), **_standalone()}),
        "tls": _object({"secretName": _text("Secret with ca.crt, tls.crt and tls.key, with tls.mode existing.")}),
    }


def _standalone() -> dict[str, Schema]:
    return {
        "image": _text("Image of Envoy.", minLength=1),
        "listenAddress": _text('"::" where there is IPv6 only.', pattern="^[0-9a-fA-F.:]+$"),
        "logLevel": {"enum": ["trace", "debug", "info", "warning", "error", "critical", "off"]},
        "service": _object(
            {
                "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                "port": _port(),
                "annotations": _labels("Of the Service that agents use."),
            }
        ),
        "resources": _foreign("ResourceRequirements of the container."),
    }


def _operator() -> Schema:
    return _object(
        {
            "enabled": _flag("Run an operator; false: another release's serves these pools."),
            "replicas": {"type": "integer", "minimum": 0, "description": "One leads, the others are ready to."},
            "namespaces": {
                "type": "array",
                "description": "Serve these only, with a Role in each; empty: the whole cluster.",
                "uniqueItems": True,
                "items": {"type": "string", "pattern": _DNS_LABEL},
            },
            "serviceAccount": _object(
                {
                    "create": _flag("Make a ServiceAccount."),
                    "name": _text("Its name, or that of one that is there."),
                    "annotations": _labels("Of the ServiceAccount."),
                }
            ),
            **_component(),
        }
    )


def _tls() -> Schema:
    hours = {"pattern": "^([0-9]+(h|m|s))+$"}
    return _object(
        {
            "mode": {
                "enum": ["selfSigned", "certManager", "existing", "disabled"],
                "description": "Where the certificates of feed and picker come from.",
            },
            "selfSigned": _object({"validityDays": {"type": "integer", "minimum": 1, "maximum": 36500}}),
            "certManager": _object(
                {
                    "issuerRef": _object(
                        {
                            "name": _text("Empty: the chart makes a CA of its own."),
                            "kind": _text("Issuer or ClusterIssuer.", minLength=1),
                            "group": _text("Group of the issuer.", minLength=1),
                        }
                    ),
                    "duration": _text("How long a certificate is valid.", **hours),
                    "renewBefore": _text("How long before its end it is renewed.", **hours),
                }
            ),
            "existing": _object(
                {"operatorSecretName": _text("Secret with ca.crt, tls.crt and tls.key of the operator.")}
            ),
        }
    )


def _object(properties: Mapping[str, Schema], **more: Any) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": dict(properties), **more}


def _foreign(description: str) -> Schema:
    """A value of Kubernetes' own, which the API server checks."""
    return {"type": "object", "description": description}


def _text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


def _flag(description: str) -> Schema:
    return {"type": "boolean", "description": description}


def _labels(description: str) -> Schema:
    return {"type": "object", "description": description, "additionalProperties": {"type": "string"}}


def _peers(description: str) -> Schema:
    return {"type": "array", "description": description, "items": _foreign("A NetworkPolicyPeer.")}


def _port() -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": 65535}


_KEPT: Final = (
    "description",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "minimum",
    "maximum",
    "required",
)


def _closed(node: Mapping[str, Any]) -> Schema:
    """A structural schema of a CRD as draft 7: unknown fields refused, null allowed where it is nullable."""
    schema: Schema = {key: node[key] for key in _KEPT if key in node}
    schema["type"] = [node["type"], "null"] if node.get("nullable") else node["type"]
    if node.get("nullable") and "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    if node.get("exclusiveMinimum"):
        schema["exclusiveMinimum"] = schema.pop("minimum")
    if node.get("x-kubernetes-list-type") == "set":
        schema["uniqueItems"] = True
    if "items" in node:
        schema["items"] = _closed(node["items"])
    if "additionalProperties" in node:
        schema["additionalProperties"] = _closed(node["additionalProperties"])
    if "properties" in node:
        schema |= {
            "additionalProperties": False,
            "properties": {name: _closed(field) for name, field in node["properties"].items()},
        }
    return schema


if __name__ == "__main__":
    for path, content in files().items():
        (CHARTS / path).parent.mkdir(parents=True, exist_ok=True)
        (CHARTS / path).write_text(content)
