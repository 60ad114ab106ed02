"""The subset hint: the only endpoints a proxy lets a request go to.

The exchange reads it from the metadata of either request message; the selector asks it about each candidate. What
it protects from: sending a request to a pod of another pool because its address was written differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, Final, Self

SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"


@dataclass(frozen=True, slots=True)
class Subset:
    """Endpoints as ``(ip, port)`` and whole addresses as ``(ip, "")``; an empty one allows nothing."""

    members: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def of(cls, entries: Iterable[str]) -> Self:
        """Read entries: each ``ip``, ``ip:port``, ``[v6]:port`` or several of them with commas between."""
        texts = (text.strip() for entry in entries for text in entry.split(","))
        return cls(frozenset(_split(text) for text in texts if text))

    @classmethod
    def from_metadata(cls, metadata: Any) -> Self | None:
        """Read the hint of one message's ``metadata_context`` (``envoy.config.core.v3.Metadata``).

        Returns None where the key is absent: every worker may be chosen. A value that is no string is ignored.
        """
        namespaces = metadata.filter_metadata
        # Looking up a missing key in a protobuf map would create it.
        if SUBSET_NAMESPACE not in namespaces:
            return None
        fields = namespaces[SUBSET_NAMESPACE].fields
        if SUBSET_KEY not in fields:
            return None
        value = fields[SUBSET_KEY]
        values = value.list_value.values if value.HasField("list_value") else (value,)
        return cls.of(each.string_value for each in values if each.HasField("string_value"))

    def allows(self, endpoint: str) -> bool:
        """Whether ``endpoint``, ``ip:port`` or ``[v6]:port``, may be chosen."""
        host, port = _split(endpoint)
        return (host, port) in self.members or (host, "") in self.members


@lru_cache(maxsize=4096)
def _split(text: str) -> tuple[str, str]:
    """Split an address into ip and port, "" for none; equal IPv6 addresses come out equal."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host, port = text, ""
    try:
        return str(ip_address(host)), port
    except ValueError:
        return host.lower(), port
