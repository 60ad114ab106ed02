"""Snapshots from a policy file, and a new one whenever the file says something else.

The process runs one of these in place of the operator's feed. The file is read and compared whole, a few times a
second at most: a modification time misses a second edit within its granule, and a directory watch misses what a
ConfigMap does (a link to a link is swapped) or an editor that puts a new file in the old one's place. A content
counts once two looks in a row saw it, which keeps a file that is still being written from being taken by half: half
a list of workers is a good file, and would free the programs of the others. What is refused changes nothing and is
said once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

from thunderagent_epp.feed.policy_file import PolicyFile, PolicyFileError, parse_policy_file, read_policy_file
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry import logs
from thunderagent_epp.telemetry.metrics import Metrics

LOOK_INTERVAL_SECONDS: Final = 0.5

log = logs.logger("feed")


class StaticFileFeed:
    """Follows one policy file; ids count from 1, one more for each change of the snapshot.

    ``snapshot_of`` makes a snapshot of what the file says and an id; it is asked for each content of the file, and by
    `renew`. The file is read when the feed is made. Raises PolicyFileError then, never later.
    """

    def __init__(
        self,
        path: Path,
        publish: Callable[[Snapshot], None],
        metrics: Metrics,
        look_interval_seconds: float = LOOK_INTERVAL_SECONDS,
        snapshot_of: Callable[[PolicyFile, int], Snapshot] = PolicyFile.snapshot,
    ) -> None:
        self._path = path
        self._publish = publish
        self._metrics = metrics
        self._look_interval_seconds = look_interval_seconds
        self._taken: bytes | str = read_policy_file(path)
        """The content last accepted or refused; where there is none to read, why."""
        self._snapshot_of = snapshot_of
        self._policy = parse_policy_file(self._taken, str(path))
        self._snapshot = snapshot_of(self._policy, 1)
        self._refused = False

    async def run(self) -> NoReturn:
        """Publish what the file says now, then every change of it, until cancelled."""
        self._publish(self._snapshot)
        log.info("policy file in force", path=str(self._path), snapshot=1, workers=len(self._snapshot.capacity.workers))
        seen = self._taken
        while True:
            await asyncio.sleep(self._look_interval_seconds)
            before, seen = seen, self._look()
            if seen != self._taken and seen == before:
                self._take(seen)

    def reload(self) -> None:
        """Take the file as it is at this moment, without waiting for it to settle."""
        content = self._look()
        if content != self._taken:
            self._take(content)

    def renew(self) -> bool:
        """Make the snapshot anew from what the file said last; publish it and return True if it is another."""
        snapshot = self._snapshot_of(self._policy, self._snapshot.id + 1)
        if replace(snapshot, id=self._snapshot.id) == self._snapshot:
            return False
        self._snapshot = snapshot
        self._publish(snapshot)
        return True

    def _look(self) -> bytes | str:
        try:
            return read_policy_file(self._path)
        except PolicyFileError as error:
            return str(error)

    def _take(self, content: bytes | str) -> None:
        self._taken = content
        try:
            if isinstance(content, str):
                raise PolicyFileError(content)
            policy = parse_policy_file(content, str(self._path))
        except PolicyFileError as error:
            self._refused = True
            self._metrics.policy_file_reload(applied=False)
            for problem in str(error).splitlines():
                log.warning("policy file refused; the last good one stays", problem=problem, snapshot=self._snapshot.id)
            return
        self._metrics.policy_file_reload(applied=True)
        if self._refused:
            self._refused = False
            log.info("policy file is good again", path=str(self._path))
        self._policy = policy
        if not self.renew():
            log.debug("policy file says the same as before", path=str(self._path))
            return
        log.info(
            "policy file in force",
            path=str(self._path),
            snapshot=self._snapshot.id,
            workers=len(self._snapshot.capacity.workers),
        )
