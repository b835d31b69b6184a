"""The question that planning commands and functions share, as it is typed or called: names or objects, and numbers.

    Query(model="llama3-70b", cluster="dgx-h100", gpus=64, batch=512, seq=8192, strategy="tp=8,zero=1")

`resolution.read` resolves it: presets and files are loaded, what is missing or contradicts itself is an InputError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from phalanx.spec.strategy.stack_options import AS_RELEASED, StackOptions

if TYPE_CHECKING:
    from phalanx.frameworks.caveats import Caveat
    from phalanx.frameworks.stated_training import StatedTraining
    from phalanx.spec.cluster.spec import ClusterSpec
    from phalanx.spec.job import Job
    from phalanx.spec.model.spec import ModelSpec
    from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Query:
    """A question about a training step; a field that is None is not given."""

    source: str | Path | None = None
    """A plan.json, a run's folder or another framework's configuration, in place of model, cluster, batch and seq."""
    model: str | ModelSpec | None = None
    """A preset, a Hugging Face config.json, or a ModelSpec."""
    cluster: str | ClusterSpec | None = None
    """A preset, a TOML file, or a ClusterSpec."""
    gpus: int | None = None
    batch: int | None = None
    """Global batch: sequences per step, over all GPUs."""
    seq: int | None = None
    """Tokens per sequence."""
    strategy: str | Strategy | None = None
    """One line, such as tp=8,zero=1; dp takes the GPUs that are left. In a search: fields to keep; `pp=*` is open."""
    stack: str | None = None
    """The software stack whose step is priced; by default that of the source, else megatron-core, on TPUs
    maxtext."""
    precision: str | None = None
    """Precision of matrix products: bf16, fp16, fp8, ...; by default the widest 16-bit type of the device."""
    options: str | None = None
    """Options of the stack, such as first_moment=bfloat16,loss_as_layer=1."""
    where: str | None = None
    """Conditions on the strategies of a search, such as "tp<=8, zero=1", and options of the stack."""
    job: Job | None = None
    """Optimizer and clipping, where they are not the defaults; the fields above override its batch, length, types."""
    calibration: Path | None = None
    """A file of `phalanx measure steps`: factors of the cluster's seconds, from measured steps."""
    changes: tuple[str, ...] = ()
    """Fields of the model that differ from its source, such as model.max_seq=32768."""
    files: tuple[Path, ...] = ()
    """Further files of a configuration, such as DeepSpeed's; the files that it names itself are read anyway."""


@dataclass(frozen=True)
class Configured:
    """The part of another framework's configuration that has no field in a Query."""

    options: StackOptions = AS_RELEASED
    job: Job | None = None
    """Its optimizer, clipping, and number types of state."""
    notes: tuple[str, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    """What matters to its price and is not modelled, not judged, assumed or missing."""
    training: StatedTraining | None = None
    void_zero: int | None = None
    """The file's ZeRO level where data parallelism is over one rank, so that it shards nothing; else None."""
    void_sp: bool = False
    """Whether it asks for sequence parallelism, and has one rank of tensor parallelism."""
    followed: Mapping[str, str] = field(default_factory=dict)
    """Field left open -> the field whose value it takes, such as etp -> tp."""
    fills: bool = False
    """Whether dp is derived: the GPUs over the other degrees."""


class QueryFields(TypedDict, total=False):
    """The fields of a Query as keyword arguments: `phalanx.predict(model="llama3-8b", ...)`."""

    files: tuple[Path, ...]
    changes: tuple[str, ...]
    model: str | ModelSpec | None
    cluster: str | ClusterSpec | None
    gpus: int | None
    batch: int | None
    seq: int | None
    strategy: str | Strategy | None
    stack: str | None
    precision: str | None
    options: str | StackOptions | Mapping[str, object] | None
    where: str | None
    calibration: Path | None
    job: Job | None


Source = str | Path | Query | None


def query_of(source: Source, fields: QueryFields) -> Query:
    """Return the Query of a call: `source` may be one already, whose fields the keyword arguments replace."""
    if not isinstance(options := fields.get("options"), str | None):
        table = options.changed() if isinstance(options, StackOptions) else options
        fields = {**fields, "options": ",".join(f"{name}={value}" for name, value in table.items())}
    return replace(source if isinstance(source, Query) else Query(source), **fields)  # type: ignore[arg-type]
