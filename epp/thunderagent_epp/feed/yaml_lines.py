"""YAML as plain values, with the line each of them was written on.

A policy file's errors name the line, which PyYAML's loaders forget. Here the node tree is kept beside the values.
Refuses what a loader would silently accept: a key given twice, a key that is no text, a value that holds itself.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

from thunderagent_epp.feed.problems import FieldPath, Problem

Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML has it: ten times faster on a file of a thousand workers."""


class YamlError(Exception):
    """What is wrong, and on which line (from 1)."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class Document:
    """One YAML document: its ``value``, and the line of every part of it.

    Raises YamlError for anything but one well-formed document of plain values.
    """

    def __init__(self, text: str) -> None:
        try:
            loader = Loader(text)
            self._root: yaml.Node | None = loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise YamlError(mark.line + 1 if mark else 1, _syntax_message(error)) from None
        except yaml.reader.ReaderError as error:
            line = text.encode().count(b"\n", 0, error.position) + 1
            raise YamlError(line, f"holds a character YAML does not allow: #x{error.character:04x}") from None
        except RecursionError:
            raise YamlError(1, "is nested too deeply") from None
        try:
            self.value: Any = None if self._root is None else _Reading(loader).value(self._root, ())
        except RecursionError:
            raise YamlError(1, "is nested too deeply") from None

    def line(self, path: FieldPath) -> int:
        """The line of a field's name or a list's item; of the innermost part that exists when ``path`` does not."""
        node, line = self._root, 1
        for step in path:
            match node:
                case yaml.MappingNode():
                    # Merged-in pairs come first, what the file says at this place last and wins.
                    pair = next((pair for pair in reversed(node.value) if pair[0].value == step), None)
                    if pair is None:
                        return line
                    line, node = pair[0].start_mark.line + 1, pair[1]
                case yaml.SequenceNode() if isinstance(step, int) and step < len(node.value):
                    node = node.value[step]
                    line = node.start_mark.line + 1
                case _:
                    return line
        return line


class _Reading:
    """Turns nodes into values; a node used twice (an alias) is read once."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._values: dict[int, Any] = {}
        self._open: set[int] = set()

    def value(self, node: yaml.Node, path: FieldPath) -> Any:
        if id(node) in self._values:
            return self._values[id(node)]
        if id(node) in self._open:
            raise _fault(node, path, "is a value that holds itself")
        self._open.add(id(node))
        match node:
            case yaml.MappingNode():
                value: Any = self._mapping(node, path)
            case yaml.SequenceNode():
                value = [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            case _:
                value = self._scalar(node, path)
        self._values[id(node)] = value
        return value

    def _mapping(self, node: yaml.MappingNode, path: FieldPath) -> dict[str, Any]:
        written: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag not in _KEY_TAGS:
                raise _fault(key, path, "a field's name must be text; put it in quotes")
            if key.value in written:
                raise _fault(key, (*path, key.value), "is there twice")
            written.add(key.value)
        try:
            self._loader.flatten_mapping(node)
        except yaml.MarkedYAMLError:
            raise _fault(node, path, "only a mapping can be merged in with <<") from None
        return {key.value: self.value(value, (*path, key.value)) for key, value in node.value}

    def _scalar(self, node: yaml.Node, path: FieldPath) -> Any:
        try:
            return self._loader.construct_object(node)
        except yaml.MarkedYAMLError:
            raise _fault(node, path, f"the tag {node.tag} is not allowed") from None
        except ValueError as error:
            raise _fault(node, path, f"is no valid {node.tag.rpartition(':')[2]}: {error}") from None


_KEY_TAGS: Final = frozenset({"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"})


def _fault(node: yaml.Node, path: FieldPath, message: str) -> YamlError:
    return YamlError(node.start_mark.line + 1, str(Problem(path, message)))


def _syntax_message(error: yaml.MarkedYAMLError) -> str:
    context = f" ({error.context})" if error.context else ""
    return f"is not valid YAML: {error.problem}{context}"
