"""What an API server says to a custom resource, told from its CRD: nulls dropped, defaults filled in, unknown fields
refused (as `kubectl` asks for), then the schema, the sets and the CEL rules. Only the keywords a CRD may hold."""

from __future__ import annotations

import copy
from typing import Any

import celpy
from celpy import celtypes
from jsonschema import Draft4Validator

_CEL = celpy.Environment()
_KUBERNETES_FUNCTIONS = {"lowerAscii": lambda text: celtypes.StringType(text.lower())}
_CEL_TYPES = {"integer": celtypes.IntType, "number": celtypes.DoubleType, "string": celtypes.StringType}


def refusals(crd: dict[str, Any], resource: dict[str, Any]) -> list[str]:
    """Every fault of an object by the schema of the CRD's only version; empty when it would be taken."""
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    resource = copy.deepcopy(resource)
    found = [f"{path}: unknown field" for path in _unknown(resource, schema, "")]
    _fill_in(resource, schema)
    validator = Draft4Validator(_plain(schema))
    found += [f"{_name(error.absolute_path)}: {error.message}" for error in validator.iter_errors(resource)]
    # The API server does not go on to the rules either.
    return found or list(_broken_rules(resource, schema, ""))


def with_defaults(crd: dict[str, Any], resource: dict[str, Any]) -> dict[str, Any]:
    """The object as the API server stores it."""
    resource = copy.deepcopy(resource)
    _fill_in(resource, crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    return resource


def _name(path: Any) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _inner(value: Any, schema: dict[str, Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    """The parts of a value that have a schema of their own, with the end of their path."""
    if isinstance(value, list):
        return [(f"[{index}]", item, schema.get("items", {})) for index, item in enumerate(value)]
    if isinstance(value, dict):
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        return [
            (f".{name}", field, fields.get(name, others)) for name, field in value.items() if name in fields or others
        ]
    return []


def _unknown(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    found = []
    if isinstance(value, dict) and "properties" in schema:
        found = [f"{path}.{name}".removeprefix(".") for name in value if name not in schema["properties"]]
    for step, inner, inner_schema in _inner(value, schema):
        found += _unknown(inner, inner_schema, path + step)
    return found


def _fill_in(value: Any, schema: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for name, field in schema.get("properties", {}).items():
            if name in value and value[name] is None and not field.get("nullable"):
                del value[name]
            if name not in value and "default" in field:
                value[name] = copy.deepcopy(field["default"])
    for _, inner, inner_schema in _inner(value, schema):
        _fill_in(inner, inner_schema)


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without Kubernetes' own keywords, which JSON Schema does not know."""
    plain = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-") and key != "nullable"}
    if schema.get("nullable"):
        plain["type"] = [schema["type"], "null"]
    if schema.get("x-kubernetes-int-or-string"):
        plain["type"] = ["integer", "string"]
    if schema.get("x-kubernetes-list-type") == "set":
        plain["uniqueItems"] = True
    for key in ("items", "additionalProperties"):
        if key in plain:
            plain[key] = _plain(plain[key])
    if "properties" in plain:
        plain["properties"] = {name: _plain(field) for name, field in plain["properties"].items()}
    return plain


def _broken_rules(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    if value is None:
        return []
    found = []
    for rule in schema.get("x-kubernetes-validations", []):
        if not _evaluate(rule["rule"], value, schema):
            computed = rule.get("messageExpression")
            message = rule["message"] if computed is None else _evaluate(computed, value, schema)
            found.append(f"{path}{rule.get('fieldPath', '')}: {message}".removeprefix("."))
    for step, inner, inner_schema in _inner(value, schema):
        found += _broken_rules(inner, inner_schema, path + step)
    return found


def _evaluate(expression: str, value: Any, schema: dict[str, Any]) -> Any:
    return _CEL.program(_CEL.compile(expression), _KUBERNETES_FUNCTIONS).evaluate({"self": _cel(value, schema)})


def _cel(value: Any, schema: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return celtypes.MapType(
            {celtypes.StringType(step[1:]): _cel(inner, of) for step, inner, of in _inner(value, schema)}
        )
    if isinstance(value, list):
        return celtypes.ListType([_cel(inner, of) for _, inner, of in _inner(value, schema)])
    if value is None:
        return None
    return _CEL_TYPES.get(schema.get("type", ""), celpy.json_to_cel)(value)
