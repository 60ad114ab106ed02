from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from thunderagent_epp.feed import capacity_feed_pb2 as pb
from thunderagent_epp.feed.wire import (
    Applied,
    Counters,
    SnapshotRefusedError,
    read_applied,
    read_counters,
    read_snapshot,
    write_applied,
    write_counters,
    write_snapshot,
)
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Role, Worker, WorkerRank
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.topology import Disaggregation, Handoff, RetentionPool
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry.status import Gauges, WorkerStatus

A = Worker(WorkerRank("a", 0), "10.0.0.1:8000", capacity_tokens=1000)
B = Worker(WorkerRank("b", 1), "[fd00::1]:8001", capacity_tokens=None, live=False, role=Role.DECODE, block_size=64)
EVERYTHING = Snapshot(
    id=42,
    capacity=CapacitySnapshot((A, B, Worker(WorkerRank("c"), "10.0.0.3:1", 7, True, Role.PREFILL, "uid/3", 1))),
    admission=AdmissionPolicy.from_parameters(
        {
            "policy": "Disabled",
            "pause_threshold": 0.9,
            "pause_target": 0.0,
            "resume_hysteresis": 0.25,
            "resume_timeout_seconds": 1.5,
            "session_retention_seconds": 2.5,
            "scheduler_interval_seconds": 0.5,
            "acting_token_weight": 0.125,
            "acting_decay_tau_seconds": 3.0,
            "buffer_per_program": 0,
            "max_tracked_requests": 5,
            "max_hold_seconds": 60.0,
        }
    ),
    requests=RequestPolicy(session_headers=("x-session", "x-other"), strip_body_fields=("thunder", "nvext")),
    disaggregation=Disaggregation(RetentionPool.BOTH, Handoff.DYNAMO),
)
PLAIN = Snapshot(id=1, capacity=CapacitySnapshot((A,)))


def sent(snapshot: Snapshot) -> Snapshot:
    return read_snapshot(pb.Snapshot.FromString(write_snapshot(snapshot).SerializeToString()))


def refusal(message: pb.Snapshot) -> str:
    with pytest.raises(SnapshotRefusedError) as refused:
        read_snapshot(message)
    return str(refused.value)


@pytest.mark.parametrize(
    "snapshot",
    [
        EVERYTHING,
        PLAIN,
        Snapshot(id=2**62, capacity=CapacitySnapshot()),
        Snapshot(id=1, capacity=CapacitySnapshot((B,), liveness_known=False)),
        Snapshot(id=1, capacity=CapacitySnapshot(), requests=RequestPolicy(session_headers=())),
        Snapshot(id=1, capacity=CapacitySnapshot(), disaggregation=Disaggregation()),
    ],
)
def test_a_snapshot_arrives_as_it_was_sent(snapshot: Snapshot) -> None:
    assert sent(snapshot) == snapshot


def test_an_unknown_capacity_is_not_zero() -> None:
    message = write_snapshot(EVERYTHING)
    assert [worker.HasField("capacity_tokens") for worker in message.workers] == [True, False, True]


def test_the_content_hash_knows_neither_the_id_nor_the_order_workers_were_given_in() -> None:
    first = write_snapshot(Snapshot(id=1, capacity=CapacitySnapshot((A, B))))
    second = write_snapshot(Snapshot(id=2, capacity=CapacitySnapshot((B, A))))
    assert first.content_hash == second.content_hash
    assert len(first.content_hash) == 64


@pytest.mark.parametrize(
    "other",
    [
        Snapshot(id=1, capacity=CapacitySnapshot((A,), liveness_known=False)),
        Snapshot(id=1, capacity=CapacitySnapshot((A,)), admission=AdmissionPolicy(policy="Disabled")),
        Snapshot(id=1, capacity=CapacitySnapshot((A,)), requests=RequestPolicy(session_headers=())),
        Snapshot(id=1, capacity=CapacitySnapshot((A,)), disaggregation=Disaggregation()),
        Snapshot(id=1, capacity=CapacitySnapshot((Worker(A.id, A.endpoint, 1000, incarnation="2"),))),
    ],
)
def test_any_other_content_has_another_hash(other: Snapshot) -> None:
    assert write_snapshot(other).content_hash != write_snapshot(PLAIN).content_hash


def test_a_number_of_more_than_64_bits_cannot_be_written() -> None:
    endless = AdmissionPolicy.from_parameters({"buffer_per_program": 2**63})
    with pytest.raises(ValueError, match="out of range"):
        write_snapshot(Snapshot(id=1, capacity=CapacitySnapshot(), admission=endless))


def test_parameters_left_out_have_their_defaults() -> None:
    message = pb.Snapshot(id=1, admission=pb.Admission(pause_threshold=0.9))
    message.workers.add(name="a", endpoint="10.0.0.1:1")
    snapshot = read_snapshot(message)
    assert snapshot.admission == AdmissionPolicy.from_parameters({"pause_threshold": 0.9})
    assert snapshot.requests == RequestPolicy()
    assert snapshot.disaggregation is None
    assert snapshot.capacity.workers == (Worker(WorkerRank("a"), "10.0.0.1:1", live=False),)


def worker(**fields: object) -> pb.Snapshot:
    message = pb.Snapshot(id=1)
    message.workers.add(**{"name": "a", "endpoint": "10.0.0.1:8000"} | fields)
    return message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.Snapshot(), "id: must be positive, not 0"),
        (worker(name=""), "workers[/0].name: must be a name, and rank not negative"),
        (worker(rank=-1), "workers[a/-1].name: must be a name, and rank not negative"),
        (worker(endpoint=""), "workers[a/0].endpoint: must be ip:port or [v6]:port, not ''"),
        (worker(endpoint="a:80"), "workers[a/0].endpoint: must be ip:port or [v6]:port, not 'a:80'"),
        (worker(endpoint="10.0.0.1"), "workers[a/0].endpoint: must be ip:port or [v6]:port, not '10.0.0.1'"),
        (worker(endpoint="fd00::1:80"), "workers[a/0].endpoint: must be ip:port or [v6]:port, not 'fd00::1:80'"),
        (worker(endpoint="10.0.0.1:0"), "workers[a/0].endpoint: must be ip:port or [v6]:port, not '10.0.0.1:0'"),
        (worker(endpoint="[10.0.0.1]:1"), "workers[a/0].endpoint: must be ip:port or [v6]:port, not '[10.0.0.1]:1'"),
        (worker(capacity_tokens=0), "workers[a/0].capacity_tokens: must be positive or left out, not 0"),
        (worker(block_size=0), "workers[a/0].block_size: must be positive, not 0"),
        (worker(role=9), "workers[a/0].role: 9 is not known to this version"),
        (
            pb.Snapshot(id=1, workers=[*worker().workers, *worker().workers]),
            "workers: two workers share a name and rank",
        ),
        (
            pb.Snapshot(id=1, admission=pb.Admission(policy="Prophetic")),
            "admission.policy: Input should be 'Disabled', 'Classic' or 'Rotation'",
        ),
        (
            pb.Snapshot(id=1, admission=pb.Admission(pause_threshold=0.5, pause_target=0.6)),
            "admission.pause_target: must not be above the pause threshold: 0.6 > 0.5",
        ),
        (
            pb.Snapshot(id=1, admission=pb.Admission(resume_timeout_seconds=float("nan"))),
            "admission.resume_timeout_seconds: Input should be a finite number",
        ),
        (
            pb.Snapshot(id=1, requests=pb.Requests(strip_body_fields=[""])),
            "requests.stripBodyFields.0: must be the name of a top-level field, not empty",
        ),
        (
            pb.Snapshot(id=1, disaggregation=pb.Disaggregation(retention_pool=7)),  # type: ignore[arg-type]
            "disaggregation.retention_pool: 7 is not known to this version",
        ),
        (
            pb.Snapshot(id=1, disaggregation=pb.Disaggregation(handoff=7)),  # type: ignore[arg-type]
            "disaggregation.handoff: 7 is not known to this version",
        ),
    ],
)
def test_what_cannot_be_applied_is_refused_with_the_field_that_is_wrong(message: pb.Snapshot, reason: str) -> None:
    assert refusal(message) == reason


def newer_version() -> type[Message]:
    """The feed's Snapshot as a later version may have it: fields more at the top, in a worker and in the policy."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        if message.name in {"Snapshot", "Worker", "Admission"}:
            message.field.add(
                name="added_later",
                number=900,
                type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
                label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("thunderagent.feed.v1.Snapshot"))


def test_a_message_of_a_newer_version_is_read_without_what_is_unknown() -> None:
    newer = newer_version()()
    newer.ParseFromString(write_snapshot(EVERYTHING).SerializeToString())
    for part in (newer, newer.admission, *newer.workers):  # type: ignore[attr-defined]
        part.added_later = "something new"
    assert read_snapshot(pb.Snapshot.FromString(newer.SerializeToString())) == EVERYTHING


def test_what_is_in_force_arrives_as_it_was_sent() -> None:
    assert read_applied(pb.Open(applied=write_applied(Applied(3, "abc")))) == Applied(3, "abc")
    assert read_applied(pb.Acknowledgement(applied=write_applied(None))) is None


def test_counters_arrive_as_they_were_sent() -> None:
    counters = Counters(programs=5, paused=2, waiting=3, tracked=4, used={WorkerRank("a", 1): 900})
    assert read_counters(pb.Counters.FromString(write_counters(counters).SerializeToString())) == counters


def test_counters_are_taken_from_the_gauges_of_the_picker() -> None:
    gauges = Gauges(
        workers=[
            WorkerStatus("a", 0, "10.0.0.1:1", Role.BOTH, True, 1000, 900),
            WorkerStatus("b", 0, "10.0.0.2:1", Role.BOTH, True, 1000, 0),
        ],
        programs={("acting", "paused"): 1, ("reasoning", "paused"): 2, ("acting", "active"): 4},
        waiting=3,
        tracked=6,
    )
    assert Counters.of(gauges) == Counters(programs=7, paused=3, waiting=3, tracked=6, used={WorkerRank("a"): 900})
