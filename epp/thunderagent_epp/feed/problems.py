"""Says what is wrong with something a user wrote, in the user's words: the field as written, and one sentence.

pydantic finds the faults, this module words them, so that a policy file's messages and a ThunderAgentPolicy's
condition read alike. It keeps the validator's vocabulary ("Input should be …") from reaching users. Knows nothing of
files; `policy_file.py` adds the lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

FieldPath = tuple[str | int, ...]
"""From the top to a field: names of mappings, indices of lists."""

_SHOWN_CHARACTERS_MAX = 40


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault. ``near`` is the place to show when the field at ``path`` was not written at all."""

    path: FieldPath
    message: str
    near: FieldPath | None = None

    @property
    def field(self) -> str:
        """The field as a user writes it: ``workers[1].ports``; empty for the whole."""
        return field_name(self.path)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.path else self.message


def field_name(path: FieldPath) -> str:
    """``("workers", 1, "ports")`` as ``workers[1].ports``."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def problems(error: ValidationError, model: type[BaseModel], given: object, *, by_alias: bool = True) -> list[Problem]:
    """Word every fault pydantic found in ``given``, which was validated as a ``model``, by alias or by name."""
    return [_problem(details, model, given, by_alias) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, model: type[BaseModel], given: object, by_alias: bool) -> Problem:
    written: FieldPath = details["loc"]
    path = _as_written(written, model) if by_alias and details["type"] != "extra_forbidden" else written
    schema = _schema(model, by_alias)
    if details["type"] != "value_error":
        return Problem(path, _sentence(details, path, schema, given))
    message = str(details["ctx"]["error"])
    siblings = _lookup(given, path[:-1])
    if not path or not isinstance(siblings, Mapping) or path[-1] in siblings:
        return Problem(path, message)
    # A default that does not go with what was written beside it: show the line of that.
    said = message.replace(" ", "").lower()
    near = next(((*path[:-1], name) for name in siblings if name.lower() in said), None)
    return Problem(path, f"{message} ({_at(schema, path).get('default')} is the default)", near)


def _as_written(loc: FieldPath, model: type[BaseModel]) -> FieldPath:
    """Spell each field by its alias: pydantic names one that was left out as the code does."""
    steps: list[str | int] = []
    here: type[BaseModel] | None = model
    for step in loc:
        if isinstance(step, str) and here is not None:
            fields = here.model_fields
            name = next((name for name, field in fields.items() if step in (name, field.alias)), None)
            steps.append(step if name is None else fields[name].alias or name)
            here = None if name is None else _model_in(fields[name].annotation)
        else:
            steps.append(step)
    return tuple(steps)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model a field holds, itself or in a list or an optional."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _model_in(inner))), None)


def _sentence(details: ErrorDetails, path: FieldPath, schema: Mapping[str, Any], given: object) -> str:
    written = _lookup(given, path)
    context = details.get("ctx", {})
    match details["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return _unknown_field(str(path[-1]), _at(schema, path[:-1]).get("properties", {}))
        case "float_type" | "float_parsing":
            return f"must be a number, not {shown(written)}"
        case "int_type" | "int_from_float" | "int_parsing":
            return f"must be a whole number, not {shown(written)}"
        case "finite_number":
            return f"must be a finite number, not {shown(written)}"
        case "string_type":
            quote = "; put it in quotes" if isinstance(written, bool | int | float) else ""
            return f"must be text, not {shown(written)}{quote}"
        case "bool_type" | "bool_parsing":
            return f"must be true or false, not {shown(written)}"
        case "list_type" | "tuple_type":
            return f"must be a list, not {shown(written)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"must be a mapping of fields, not {shown(written)}"
        case "literal_error" | "enum":
            return f"must be {str(context['expected']).replace(chr(39), '')}, not {shown(written)}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return f"must be {_bounds(_at(schema, path), context)}, not {shown(written)}"
        case "too_short":
            return f"must have at least {context['min_length']}, not {context['actual_length']}"
        case "too_long":
            return f"must have at most {context['max_length']}, not {context['actual_length']}"
        case "string_too_short" if context["min_length"] == 1:
            return "must not be empty"
        case "string_too_short":
            return f"must have at least {context['min_length']} characters"
        case "string_too_long":
            return f"must have at most {context['max_length']} characters"
        case _:
            return details["msg"].replace("Input should", "must", 1)


def _unknown_field(name: str, known: Iterable[str]) -> str:
    folded = {other.lower(): other for other in known}
    close = get_close_matches(name.replace("_", "").lower(), folded, n=1)
    return f"unknown field; did you mean {folded[close[0]]}?" if close else "unknown field"


def _bounds(schema: Mapping[str, Any], context: Mapping[str, Any]) -> str:
    """Both bounds where there are two, from the schema; the violated one where the schema has none (durations)."""
    lowest, highest = schema.get("minimum"), schema.get("maximum")
    if lowest is not None and highest is not None:
        return f"between {lowest} and {highest}"
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    return next(f"{word} {context[bound]:g}" for bound, word in words.items() if bound in context)


def shown(value: object) -> str:
    """A value short enough for a line, as YAML would have it."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "a list"
    text = repr(value) if isinstance(value, str | bytes | int | float) else str(value)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]}…"


def _lookup(value: object, path: FieldPath) -> object:
    """What was written at a path, None where nothing was."""
    for step in path:
        match value:
            case Mapping() if step in value:
                value = value[step]
            case list() if isinstance(step, int) and step < len(value):
                value = value[step]
            case _:
                return None
    return value


@cache
def _schema(model: type[BaseModel], by_alias: bool) -> Mapping[str, Any]:
    return model.model_json_schema(by_alias=by_alias)


def _at(schema: Mapping[str, Any], path: FieldPath) -> Mapping[str, Any]:
    """The schema of the field at a path; empty where there is none."""
    here = _resolved(schema, schema)
    for step in path:
        inner = here.get("items", {}) if isinstance(step, int) else here.get("properties", {}).get(step, {})
        here = _resolved(inner, schema)
    return here


def _resolved(here: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a reference, and take the one real side of an optional field."""
    while "$ref" in here or "anyOf" in here:
        if "$ref" in here:
            here = schema["$defs"][here["$ref"].rpartition("/")[2]]
        else:
            here = next((side for side in here["anyOf"] if side.get("type") != "null"), {})
    return here
