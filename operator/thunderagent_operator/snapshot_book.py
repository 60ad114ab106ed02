"""What the operator has to say about each policy: the snapshot in force, or why there is none.

Pure: `feed.py` hands in what was found and the time, and tells the pickers what stands here. This alone gives out
ids: one more for each change of a policy's content, from the milliseconds of the wall clock at the start, so that
they are greater than those of any operator before. Where a clock went back, or another operator's was ahead, the
pickers know a greater one: the ids are then lifted above it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from thunderagent_epp.feed import capacity_feed_pb2 as pb
from thunderagent_epp.feed.wire import Applied, write_snapshot
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.scheduling.capacity import CapacitySnapshot
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.topology import Disaggregation
from thunderagent_epp.snapshot import Snapshot

ID_MAX: Final = 2**62
"""No claim above it lifts an id: that of a picker gone wrong must not use up the 64 bits of all others."""


@dataclass(frozen=True, slots=True)
class Published:
    """A snapshot in force; ``published_at`` is when it got its id, in seconds since the epoch."""

    snapshot: Snapshot
    content_hash: str
    published_at: float
    message: pb.FollowResponse = field(repr=False, compare=False)
    """As it is sent; shared by all streams and never changed."""

    @property
    def applied(self) -> Applied:
        """What a picker that has it in force says."""
        return Applied(self.snapshot.id, self.content_hash)


class Reason(Enum):
    """Why there is no snapshot of a policy."""

    NOT_FOUND = pb.NoSnapshot.REASON_NOT_FOUND
    DELETED = pb.NoSnapshot.REASON_DELETED
    NOT_ACCEPTED = pb.NoSnapshot.REASON_NOT_ACCEPTED


@dataclass(frozen=True, slots=True)
class Absent:
    """There is no snapshot of a policy; ``detail`` is for people."""

    reason: Reason
    detail: str = ""

    @property
    def message(self) -> pb.FollowResponse:
        """As it is sent."""
        return pb.FollowResponse(no_snapshot=pb.NoSnapshot(reason=self.reason.value, detail=self.detail))


class SnapshotBook:
    """Policies by ``namespace/name``. ``now`` is always seconds since the epoch."""

    def __init__(self, now: float) -> None:
        self._first_id = _milliseconds(now)
        self._published: dict[str, Published] = {}
        self._withheld: dict[str, Absent] = {}
        """Policies that are there without a snapshot."""
        self._deleted: dict[str, int] = {}
        """Last ids of policies that are gone; they go on from there when they come back."""

    def standing(self, policy: str) -> Published | Absent:
        """What a picker of this policy is to be told."""
        if policy in self._published:
            return self._published[policy]
        if policy in self._withheld:
            return self._withheld[policy]
        return Absent(Reason.DELETED if policy in self._deleted else Reason.NOT_FOUND)

    def publish(
        self,
        policy: str,
        now: float,
        capacity: CapacitySnapshot,
        admission: AdmissionPolicy,
        requests: RequestPolicy,
        disaggregation: Disaggregation | None = None,
        *,
        above: int = 0,
    ) -> Published:
        """Put a content in force and return it with its id; what is in force already keeps its id.

        A new id is greater than ``above``. Raises ValueError for a number that takes more than 64 bits.
        """
        before = self._published.get(policy)
        last = before.snapshot.id if before else self._deleted.get(policy, 0)
        snapshot = Snapshot(max(self._first_id, last + 1, above + 1), capacity, admission, requests, disaggregation)
        if before is not None and replace(snapshot, id=last) == before.snapshot:
            return before
        message = write_snapshot(snapshot)
        published = Published(snapshot, message.content_hash, now, pb.FollowResponse(snapshot=message))
        self._published[policy] = published
        self._withheld.pop(policy, None)
        self._deleted.pop(policy, None)
        return published

    def withhold(self, policy: str, detail: str) -> None:
        """The policy is there, but cannot be used as it is; a snapshot of an earlier version stays in force."""
        if policy not in self._published:
            self._withheld[policy] = Absent(Reason.NOT_ACCEPTED, detail)

    def delete(self, policy: str) -> None:
        """The policy is gone; nothing happens when it never was."""
        published = self._published.pop(policy, None)
        withheld = self._withheld.pop(policy, None)
        if published is not None:
            self._deleted[policy] = published.snapshot.id
        elif withheld is not None:
            self._deleted.setdefault(policy, 0)

    def lift(self, policy: str, claimed: Applied, now: float) -> bool:
        """Give a content an id above one a picker claims to have in force; True if that had to be done."""
        published = self._published.get(policy)
        if published is None or claimed == published.applied or not published.snapshot.id <= claimed.id <= ID_MAX:
            return False
        self._renumber(policy, published, claimed.id + 1, now)
        return True

    def start_over(self, now: float) -> None:
        """Lift every id to this moment: another operator may have given out ids until now."""
        self._first_id = max(self._first_id, _milliseconds(now))
        for policy, published in self._published.items():
            if published.snapshot.id < self._first_id:
                self._renumber(policy, published, self._first_id, now)

    def _renumber(self, policy: str, published: Published, id: int, now: float) -> None:
        message = pb.FollowResponse()
        message.CopyFrom(published.message)
        message.snapshot.id = id
        self._published[policy] = Published(
            replace(published.snapshot, id=id), published.content_hash, published_at=now, message=message
        )


def _milliseconds(now: float) -> int:
    return int(now * 1000)
