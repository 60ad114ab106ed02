# mypy: ignore-errors
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_PREFILL_DECODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_PREFILL_DECODE: Role

class FollowRequest(_message.Message):
    __slots__ = ("open", "acknowledgement", "counters")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    open: Open
    acknowledgement: Acknowledgement
    counters: Counters
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., acknowledgement: _Optional[_Union[Acknowledgement, _Mapping]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("snapshot", "no_snapshot")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    NO_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    no_snapshot: NoSnapshot
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., no_snapshot: _Optional[_Union[NoSnapshot, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("policy", "identity", "version", "applied")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    policy: str
    identity: str
    version: str
    applied: Applied
    def __init__(self, policy: _Optional[str] = ..., identity: _Optional[str] = ..., version: _Optional[str] = ..., applied: _Optional[_Union[Applied, _Mapping]] = ...) -> None: ...

class Applied(_message.Message):
    __slots__ = ("id", "content_hash")
    ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    id: int
    content_hash: str
    def __init__(self, id: _Optional[int] = ..., content_hash: _Optional[str] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ("snapshot_id", "refusal", "applied")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: int
    refusal: str
    applied: Applied
    def __init__(self, snapshot_id: _Optional[int] = ..., refusal: _Optional[str] = ..., applied: _Optional[_Union[Applied, _Mapping]] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("programs", "paused", "waiting", "tracked", "used")
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TRACKED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    programs: int
    paused: int
    waiting: int
    tracked: int
    used: _containers.RepeatedCompositeFieldContainer[Charge]
    def __init__(self, programs: _Optional[int] = ..., paused: _Optional[int] = ..., waiting: _Optional[int] = ..., tracked: _Optional[int] = ..., used: _Optional[_Iterable[_Union[Charge, _Mapping]]] = ...) -> None: ...

class Charge(_message.Message):
    __slots__ = ("worker", "rank", "tokens")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    rank: int
    tokens: int
    def __init__(self, worker: _Optional[str] = ..., rank: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class NoSnapshot(_message.Message):
    __slots__ = ("reason", "detail")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[NoSnapshot.Reason]
        REASON_NOT_FOUND: _ClassVar[NoSnapshot.Reason]
        REASON_DELETED: _ClassVar[NoSnapshot.Reason]
        REASON_NOT_ACCEPTED: _ClassVar[NoSnapshot.Reason]
    REASON_UNSPECIFIED: NoSnapshot.Reason
    REASON_NOT_FOUND: NoSnapshot.Reason
    REASON_DELETED: NoSnapshot.Reason
    REASON_NOT_ACCEPTED: NoSnapshot.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: NoSnapshot.Reason
    detail: str
    def __init__(self, reason: _Optional[_Union[NoSnapshot.Reason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("id", "content_hash", "admission", "requests", "disaggregation", "workers", "liveness_unknown")
    ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DISAGGREGATION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LIVENESS_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    id: int
    content_hash: str
    admission: Admission
    requests: Requests
    disaggregation: Disaggregation
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    liveness_unknown: bool
    def __init__(self, id: _Optional[int] = ..., content_hash: _Optional[str] = ..., admission: _Optional[_Union[Admission, _Mapping]] = ..., requests: _Optional[_Union[Requests, _Mapping]] = ..., disaggregation: _Optional[_Union[Disaggregation, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., liveness_unknown: _Optional[bool] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("policy", "pause_threshold", "pause_target", "resume_hysteresis", "resume_timeout_seconds", "session_retention_seconds", "scheduler_interval_seconds", "acting_token_weight", "acting_decay_tau_seconds", "buffer_per_program", "max_tracked_requests", "max_hold_seconds", "hold_budget", "prefill_tokens_per_second")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PAUSE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    PAUSE_TARGET_FIELD_NUMBER: _ClassVar[int]
    RESUME_HYSTERESIS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_RETENTION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACTING_TOKEN_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ACTING_DECAY_TAU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_PER_PROGRAM_FIELD_NUMBER: _ClassVar[int]
    MAX_TRACKED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_HOLD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOLD_BUDGET_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    policy: str
    pause_threshold: float
    pause_target: float
    resume_hysteresis: float
    resume_timeout_seconds: float
    session_retention_seconds: float
    scheduler_interval_seconds: float
    acting_token_weight: float
    acting_decay_tau_seconds: float
    buffer_per_program: int
    max_tracked_requests: int
    max_hold_seconds: float
    hold_budget: float
    prefill_tokens_per_second: float
    def __init__(self, policy: _Optional[str] = ..., pause_threshold: _Optional[float] = ..., pause_target: _Optional[float] = ..., resume_hysteresis: _Optional[float] = ..., resume_timeout_seconds: _Optional[float] = ..., session_retention_seconds: _Optional[float] = ..., scheduler_interval_seconds: _Optional[float] = ..., acting_token_weight: _Optional[float] = ..., acting_decay_tau_seconds: _Optional[float] = ..., buffer_per_program: _Optional[int] = ..., max_tracked_requests: _Optional[int] = ..., max_hold_seconds: _Optional[float] = ..., hold_budget: _Optional[float] = ..., prefill_tokens_per_second: _Optional[float] = ...) -> None: ...

class Requests(_message.Message):
    __slots__ = ("session_headers", "strip_body_fields")
    SESSION_HEADERS_FIELD_NUMBER: _ClassVar[int]
    STRIP_BODY_FIELDS_FIELD_NUMBER: _ClassVar[int]
    session_headers: SessionHeaders
    strip_body_fields: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_headers: _Optional[_Union[SessionHeaders, _Mapping]] = ..., strip_body_fields: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionHeaders(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class Disaggregation(_message.Message):
    __slots__ = ("retention_pool", "handoff")
    class RetentionPool(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RETENTION_POOL_UNSPECIFIED: _ClassVar[Disaggregation.RetentionPool]
        RETENTION_POOL_DECODE: _ClassVar[Disaggregation.RetentionPool]
        RETENTION_POOL_PREFILL: _ClassVar[Disaggregation.RetentionPool]
        RETENTION_POOL_BOTH: _ClassVar[Disaggregation.RetentionPool]
    RETENTION_POOL_UNSPECIFIED: Disaggregation.RetentionPool
    RETENTION_POOL_DECODE: Disaggregation.RetentionPool
    RETENTION_POOL_PREFILL: Disaggregation.RetentionPool
    RETENTION_POOL_BOTH: Disaggregation.RetentionPool
    class Handoff(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        HANDOFF_UNSPECIFIED: _ClassVar[Disaggregation.Handoff]
        HANDOFF_LLM_D: _ClassVar[Disaggregation.Handoff]
        HANDOFF_DYNAMO: _ClassVar[Disaggregation.Handoff]
    HANDOFF_UNSPECIFIED: Disaggregation.Handoff
    HANDOFF_LLM_D: Disaggregation.Handoff
    HANDOFF_DYNAMO: Disaggregation.Handoff
    RETENTION_POOL_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    retention_pool: Disaggregation.RetentionPool
    handoff: Disaggregation.Handoff
    def __init__(self, retention_pool: _Optional[_Union[Disaggregation.RetentionPool, str]] = ..., handoff: _Optional[_Union[Disaggregation.Handoff, str]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("name", "rank", "endpoint", "role", "capacity_tokens", "live", "incarnation", "block_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    endpoint: str
    role: Role
    capacity_tokens: int
    live: bool
    incarnation: str
    block_size: int
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., endpoint: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., capacity_tokens: _Optional[int] = ..., live: _Optional[bool] = ..., incarnation: _Optional[str] = ..., block_size: _Optional[int] = ...) -> None: ...
