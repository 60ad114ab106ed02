"""Server-sent events, cut out of an answer that arrives in any pieces.

Every chunk of every streamed answer passes through here, thousands an answer, so a chunk is split once and an event
that came whole is never copied again. What a worker sends is not trusted: a line or event of more bytes than allowed
still counts as an event but is not kept. Lines end in LF or CRLF (WHATWG HTML, "Server-sent events").
"""

from __future__ import annotations


class EventStream:
    """Turns bytes into the data of server-sent events; events without data (comments, pings) do not appear."""

    __slots__ = ("_data", "_max_event_bytes", "_overlong", "_partial")

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._partial = bytearray()
        self._data: bytes | bytearray | None = None
        self._overlong = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes and return the data of each event they complete, empty for one that was too long."""
        lines = chunk.split(b"\n")
        rest = lines.pop()
        events: list[bytes] = []
        if lines and self._partial:
            self._keep(lines[0])
            lines[0] = bytes(self._partial)
            self._partial.clear()
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:") or line == b"data":
                self._add(line)
            elif not line and self._data is not None:
                events.append(b"" if self._overlong else bytes(self._data))
                self._data, self._overlong = None, False
        if rest:
            self._keep(rest)
        return events

    def finish(self) -> list[bytes]:
        """End the stream and return the data of an event that lacks its closing empty line, if there is one."""
        return self.feed(b"\n\n")

    def _keep(self, piece: bytes) -> None:
        # One byte and a carriage return more than allowed is enough to know that the line is too long.
        self._partial += piece[: max(0, self._max_event_bytes + 2 - len(self._partial))]

    def _add(self, line: bytes) -> None:
        if len(line) > self._max_event_bytes:
            self._overlong = True
        data = b"" if self._overlong else line[5:]
        if self._data is None:
            self._data = data
        elif len(self._data) + 1 + len(data) > self._max_event_bytes:
            self._data, self._overlong = b"", True
        else:
            if isinstance(self._data, bytes):
                self._data = bytearray(self._data)
            self._data += b"\n" + data
