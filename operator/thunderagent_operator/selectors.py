"""Label selectors: as text for the API server, which filters pods by them, and as a test of one pod's labels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from thunderagent_operator.resources import LabelSelector

FILTER_CHARACTERS_MAX: Final = 4000
"""A filter is part of a URL; with more values than fit it is better to look at every pod."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement on a label. ``operator`` is In, NotIn, Exists or DoesNotExist."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        match self.operator:
            case "In" | "NotIn" if len(self.values) == 1:
                # The one spelling for an empty value that leaves no doubt.
                return f"{self.key}{'=' if self.operator == 'In' else '!='}{self.values[0]}"
            case "In":
                return f"{self.key} in ({','.join(self.values)})"
            case "NotIn":
                return f"{self.key} notin ({','.join(self.values)})"
            case "Exists":
                return self.key
            case _:
                return f"!{self.key}"

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether it holds; a label that is not there is none of the values of NotIn."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case _:
                return self.key not in labels


@dataclass(frozen=True, slots=True)
class PodSelector:
    """All requirements must hold. Equal for selectors that are written alike; usable as a key."""

    requirements: tuple[Requirement, ...]

    @classmethod
    def of(cls, selector: LabelSelector) -> PodSelector:
        """The selector of a policy."""
        labels = (Requirement(key, "In", (value,)) for key, value in sorted(selector.match_labels.items()))
        expressions = (Requirement(one.key, one.operator, tuple(one.values)) for one in selector.match_expressions)
        return cls((*labels, *expressions))

    def __str__(self) -> str:
        """As the ``labelSelector`` of a list or watch."""
        return ",".join(map(str, self.requirements))

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a pod with these labels is selected."""
        return all(requirement.holds(labels) for requirement in self.requirements)


def common_filter(selectors: Collection[PodSelector]) -> str:
    """A ``labelSelector`` that lets through every pod that one of ``selectors`` (at least one) lets through.

    The API server takes requirements that must all hold, so what several selectors have in common is what it can
    filter by: a label that each of them wants to be one of some values. Without any, the text is empty: every pod.
    """
    if len(set(selectors)) == 1:
        return str(next(iter(selectors)))
    wanted: dict[str, list[set[str]]] = {}
    for selector in selectors:
        values_of: dict[str, set[str]] = {}
        for requirement in selector.requirements:
            if requirement.operator == "In":
                before = values_of.get(requirement.key, set(requirement.values))
                values_of[requirement.key] = before & set(requirement.values)
        for key, values in values_of.items():
            wanted.setdefault(key, []).append(values)
    shared = [
        Requirement(key, "In", tuple(sorted(set().union(*values))))
        for key, values in wanted.items()
        if len(values) == len(selectors)
    ]
    texts = sorted((len(str(requirement)), str(requirement)) for requirement in shared)
    return texts[0][1] if texts and texts[0][0] <= FILTER_CHARACTERS_MAX else ""
