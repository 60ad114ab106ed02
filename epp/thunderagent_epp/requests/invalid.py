"""The one way in which reading a request fails."""

from __future__ import annotations


class InvalidRequest(Exception):  # noqa: N818 - named for what the request is, as everywhere in the contract
    """A request that cannot be read; the message is fit for the client (a 400, ``invalid_request``)."""
