"""The job: what is to be computed, whatever the layout; and how the run goes about it ([train])."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from phalanx.spec.errors import InputError, nearest

DType = Literal["float64", "float32", "bfloat16", "float16"]


def compute_type(word: str, field: str) -> DType:
    """The type of that name. Raises InputError."""
    for known in get_args(DType):
        if known == word:
            return cast(DType, known)
    raise InputError(field, word, "is no type to compute in", nearest(word, get_args(DType)))


DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "uint8": 1,
}


def widest(*dtypes: DType) -> DType:
    """The type that loses nothing: the first of float64, float32 that is among them, else float32."""
    return "float64" if "float64" in dtypes else "float32"


@dataclass(frozen=True)
class Precision:
    """Number types of a step. What is left out follows from `compute`: fp32, or fp64 in fp64 runs."""

    compute: DType = "float32"
    reduce: DType | None = None
    accumulate: DType | None = None
    master: DType | None = None

    @property
    def reduce_dtype(self) -> DType:
        return self.reduce or widest(self.compute)

    @property
    def accumulate_dtype(self) -> DType:
        return self.accumulate or widest(self.compute)

    @property
    def master_dtype(self) -> DType:
        return self.master or widest(self.compute)


@dataclass(frozen=True)
class Optimizer:
    """AdamW (Loshchilov & Hutter 2019), or SGD with momentum `betas[0]`; decay falls on matrices only."""

    name: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        for i, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                raise InputError(f"job.optimizer.betas[{i}]", beta, "must be in [0, 1)")
        if self.eps <= 0:
            raise InputError("job.optimizer.eps", self.eps, "must be positive")
        if self.weight_decay < 0:
            raise InputError("job.optimizer.weight_decay", self.weight_decay, "must not be negative")


@dataclass(frozen=True)
class Job:
    """`global_batch` in sequences, `seq` in tokens; `clip` is the largest global gradient norm (0: none).

    `documents` in one sequence: packed, as one text; or separate, when attention stays inside a document and
    positions start anew with each. The loss counts every target either way, the first token of a next document too.
    """

    global_batch: int
    seq: int
    precision: Precision = field(default_factory=Precision)
    optimizer: Optimizer = field(default_factory=Optimizer)
    clip: float = 1.0
    documents: Literal["packed", "separate"] = "packed"

    def __post_init__(self) -> None:
        for name in ("global_batch", "seq"):
            if getattr(self, name) < 1:
                raise InputError(f"job.{name}", getattr(self, name), "must be at least 1")
        if self.clip < 0:
            raise InputError("job.clip", self.clip, "must not be negative", "0 switches clipping off")


def require_folder_name(field: str, name: str) -> None:
    """That a run of this name has a folder of its own in runs/. Raises InputError."""
    if not re.fullmatch(r"[\w][\w.+-]*", name):
        raise InputError(field, name, "must be a plain folder name")


@dataclass(frozen=True)
class Train:
    """How a run goes about a job: data, learning rate, evaluation, saving. Times in steps unless named.

    `data`: texts, or files of token ids; `tokenizer`: a tokenizer.json for texts (empty: that beside `weights`, or
    else one is trained on them);
    `end_of_text`: the token between documents, by name or id (empty: the one that the tokenizer is known to have);
    `text_field`: of a .jsonl or .json file's objects; `data_dtype`: of the ids in a flat .bin.
    `transport`: of collectives between the ranks of a host; auto takes what was measured to be the fastest.
    `weights`: what the model starts from, a Hugging Face folder or file or a run's folder; empty: drawn by `seed`.
    `check_sync`: after every so many steps the replicas' bits are compared; 0: never. `nonfinite`: whether a step
    whose loss or gradient is not finite ends the run or is left out. `tensorboard`: metrics go there too."""

    data: str = "austen"
    tokenizer: str = ""
    end_of_text: str | int = ""
    text_field: str = "text"
    data_dtype: Literal["auto", "uint16", "uint32"] = "auto"
    name: str = ""
    weights: str = ""
    lr: float = 1e-3
    min_lr_ratio: float = 0.1
    warmup: int = 0
    steps: int = 100
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    lr_base_batch: int | None = None
    seed: int = 0
    eval_every: int = 0
    eval_batches: int = 0
    save_every: int = 0
    keep: int = 2
    check_sync: int = 0
    nonfinite: Literal["stop", "skip"] = "stop"
    threads: int = 1
    timeout_s: float = 300.0
    transport: Literal["auto", "native", "p2p", "shm"] = "auto"
    tensorboard: bool = False
    prompt: str = "It is a truth"
    sample_tokens: int = 80

    def __post_init__(self) -> None:
        for name in ("steps", "keep", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"train.{name}", getattr(self, name), "must be at least 1")
        for name in ("warmup", "eval_every", "eval_batches", "save_every", "check_sync", "sample_tokens", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"train.{name}", getattr(self, name), "must not be negative")
        if self.lr <= 0 or self.timeout_s <= 0:
            name = "lr" if self.lr <= 0 else "timeout_s"
            raise InputError(f"train.{name}", getattr(self, name), "must be positive")
        if not 0 <= self.min_lr_ratio <= 1:
            raise InputError("train.min_lr_ratio", self.min_lr_ratio, "must be between 0 and 1")
        if self.warmup >= self.steps and self.warmup:
            raise InputError(
                "train.warmup",
                self.warmup,
                f"leaves none of the {self.steps} steps",
                "use fewer than train.steps",
            )
        if self.seed >= 2**63:
            raise InputError("train.seed", self.seed, "must be below 2^63")
        if self.lr_base_batch is not None and self.lr_base_batch < 1:
            raise InputError("train.lr_base_batch", self.lr_base_batch, "must be at least 1")
        if not self.data:
            raise InputError("train.data", self.data, "is empty", "name a text file, a folder, or austen")
        if self.lr_scaling != "none" and not self.lr_base_batch:
            raise InputError(
                "train.lr_scaling",
                self.lr_scaling,
                "needs the batch that lr was tuned for",
                "set train.lr_base_batch (sequences)",
            )
        if self.name:
            require_folder_name("train.name", self.name)

    def scaled_lr(self, global_batch: int) -> float:
        """The peak learning rate for this global batch (linear: Goyal et al. 2017; sqrt: Krizhevsky 2014)."""
        if self.lr_scaling == "none" or not self.lr_base_batch:
            return self.lr
        ratio = global_batch / self.lr_base_batch
        return self.lr * (ratio if self.lr_scaling == "linear" else ratio**0.5)
