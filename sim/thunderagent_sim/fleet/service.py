"""What an engine is made of: the constants of its step time and the size of its cache, from a file or fitted.

`FITTED` is the only place where the fitted numbers stand; docs/simulation.md says what they were fitted to and how
well. They are never touched when policies are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thunderagent_epp.feed.problems import problems
from thunderagent_epp.feed.yaml_lines import Document, YamlError

Cost = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0, strict=True)]


class ServiceError(ValueError):
    """An engine file that cannot be used; its text is one line per fault, each with file, line and field."""


class Service(BaseModel):
    """The service constants of one pod. Everything left out of a file is as fitted.

    A step that computes ``p`` prompt tokens at a mean position ``x`` and one token for each of ``n`` decoding turns
    whose contexts add up to ``s`` tokens takes ``step_seconds + prefill_token_seconds · p + attention_seconds · p · x
    + decode_sequence_seconds · n + decode_context_seconds · s``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_seconds: Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)] = Field(
        0.0048, description="Seconds of every step, whatever it does."
    )
    prefill_token_seconds: Cost = Field(7.44e-6, description="Seconds for each prompt token.")
    attention_seconds: Cost = Field(0.456e-9, description="Seconds for each prompt token and token before it.")
    decode_sequence_seconds: Cost = Field(0.58e-3, description="Seconds for each decoding turn.")
    decode_context_seconds: Cost = Field(13.5e-9, description="Seconds for each token of decoding turns' contexts.")
    blocks: Count = Field(139_815, description="Blocks of the KV cache.")
    block_size: Count = Field(16, description="Tokens in a block.")
    footprint: Annotated[float, Field(ge=1, strict=True, allow_inf_nan=False)] = Field(
        1.485, description="Tokens of cache that one token of context takes."
    )
    max_batched_tokens: Count = Field(8192, description="Tokens that one step may compute.")
    max_num_seqs: Count = Field(1024, description="Turns that may run at once.")

    @property
    def usable_blocks(self) -> int:
        """Blocks for contexts as turns count them, the footprint taken off."""
        return int(self.blocks / self.footprint)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of context that one pod holds."""
        return self.usable_blocks * self.block_size


FITTED: Final = Service()
"""The pods of fleet.md's measurements."""


def load_service(path: Path) -> Service:
    """Read an engine file: a YAML mapping of `Service`'s fields. Raises ServiceError."""
    try:
        document = Document(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ServiceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ServiceError(f"{path}: is not UTF-8 text") from None
    except YamlError as error:
        raise ServiceError(f"{path}:{error.line}: {error}") from None
    given = {} if document.value is None else document.value
    if not isinstance(given, dict):
        raise ServiceError(f"{path}:1: must be a mapping of fields, such as blocks: {FITTED.blocks}")
    try:
        service = Service.model_validate(given)
    except ValidationError as error:
        faults = [(document.line(fault.near or fault.path), fault) for fault in problems(error, Service, given)]
        lines = (f"{path}:{line}: {fault}" for line, fault in sorted(faults, key=lambda fault: fault[0]))
        raise ServiceError("\n".join(lines)) from None
    if service.max_num_seqs > service.max_batched_tokens:
        line = document.line(("max_num_seqs",))
        limit = service.max_batched_tokens
        raise ServiceError(f"{path}:{line}: max_num_seqs: must not be above max_batched_tokens, {limit}")
    return service
