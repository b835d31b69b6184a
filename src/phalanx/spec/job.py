"""The job: what a step computes, independent of the layout ([job]); and how a run goes about it ([train])."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from phalanx.spec.errors import InputError, nearest

DType = Literal["float64", "float32", "bfloat16", "float16"]


def compute_type(word: str, field: str) -> DType:
    """Return `word` as a type to compute in. Raises InputError naming `field` for any other word."""
    for known in get_args(DType):
        if known == word:
            return cast(DType, known)
    raise InputError(field, word, "is not a type to compute in", nearest(word, get_args(DType)))


DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "uint8": 1,
}
"""Bytes per element, of number types and of the integers that collectives carry."""


def widest(*dtypes: DType) -> DType:
    """The type that sums of these types are kept in: float64 if one of them is, else float32."""
    return "float64" if "float64" in dtypes else "float32"


@dataclass(frozen=True)
class Precision:
    """Number types of a step (Micikevicius et al. 2018). None stands for float32, or float64 where `compute` is."""

    compute: DType = "float32"
    """Of parameters, activations and their gradients in the forward and backward pass."""
    reduce: DType | None = None
    """Of gradients in the collectives that sum them over ranks."""
    accumulate: DType | None = None
    """Of gradients summed over micro-batches."""
    master: DType | None = None
    """Of the parameters that the optimizer updates, and of its state."""

    @property
    def reduce_dtype(self) -> DType:
        """`reduce`, resolved."""
        return self.reduce or widest(self.compute)

    @property
    def accumulate_dtype(self) -> DType:
        """`accumulate`, resolved."""
        return self.accumulate or widest(self.compute)

    @property
    def master_dtype(self) -> DType:
        """`master`, resolved."""
        return self.master or widest(self.compute)


@dataclass(frozen=True)
class Optimizer:
    """The optimizer: AdamW (Loshchilov & Hutter 2019), or SGD with momentum. Raises InputError for values out of
    range."""

    name: Literal["adamw", "sgd"] = "adamw"
    """The update rule."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's two moments, each in [0, 1); SGD's momentum is the first."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment; positive."""
    weight_decay: float = 0.1
    """Decoupled weight decay, of matrices only; not negative."""

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
    """What one training step computes. Raises InputError for sizes below 1 and a negative clip."""

    global_batch: int
    """Sequences per step, over all replicas and micro-batches."""
    seq: int
    """Tokens per sequence."""
    precision: Precision = field(default_factory=Precision)
    """Number types."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """Update rule and its constants; the learning rate is in [train]."""
    clip: float = 1.0
    """The largest global gradient norm; larger gradients are scaled down to it. 0: no clipping."""
    documents: Literal["packed", "separate"] = "packed"
    """How the documents in a sequence are treated. packed: as one text. separate: attention stays inside a document
    and positions restart with each. The loss counts every target either way, also the first token of a document."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "seq"):
            if getattr(self, name) < 1:
                raise InputError(f"job.{name}", getattr(self, name), "must be at least 1")
        if self.clip < 0:
            raise InputError("job.clip", self.clip, "must not be negative", "0 switches clipping off")


def require_folder_name(field: str, name: str) -> None:
    """Require that `name` can name a run's folder in runs/: letters, digits and `_.+-`. Raises InputError."""
    if not re.fullmatch(r"[\w][\w.+-]*", name):
        raise InputError(field, name, "must be a plain folder name")


@dataclass(frozen=True)
class Train:
    """How a run goes about a job: data, learning rate, evaluation, saving. Raises InputError for bad values."""

    data: str = "austen"
    """Training text: `austen` (ships with Phalanx), a text file, .jsonl or .json, a folder of these, or token ids as
    a flat .bin or as the common name of Megatron's .bin and .idx."""
    tokenizer: str = ""
    """A tokenizer.json for texts. Empty: the one beside `weights`, else one is trained on the text."""
    end_of_text: str | int = ""
    """The token between documents, by name or id. Empty: the one that the tokenizer is known to have."""
    text_field: str = "text"
    """The field of .jsonl and .json objects that holds the text."""
    data_dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """The type of token ids in a flat .bin."""
    name: str = ""
    """The run's folder in runs/. Empty: the job file's name without its suffix."""
    weights: str = ""
    """Initial weights: a Hugging Face folder or file, or a run's folder. Empty: drawn at random from `seed`."""
    lr: float = 1e-3
    """Peak learning rate, before `lr_scaling`; positive."""
    min_lr_ratio: float = 0.1
    """The final learning rate of the cosine decay as a fraction of the peak, in [0, 1]."""
    warmup: int = 0
    """Steps of linear warm-up, fewer than `steps`."""
    steps: int = 100
    """Optimizer steps of the run."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate grows with global_batch / lr_base_batch (`scaled_lr`)."""
    lr_base_batch: int | None = None
    """The global batch, in sequences, that `lr` was tuned for; needed by `lr_scaling`."""
    seed: int = 0
    """Of initial weights and of the order of the data; below 2^63."""
    eval_every: int = 0
    """Steps between evaluations on held-out sequences; 0: only after the last step."""
    eval_batches: int = 0
    """Global batches per evaluation; 0: all held-out sequences."""
    save_every: int = 0
    """Steps between checkpoints; 0: only after the last step."""
    keep: int = 2
    """Checkpoints kept; older ones are deleted."""
    check_sync: int = 0
    """Steps between comparisons of the replicas' parameters, bit for bit; 0: never."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What happens to a step whose loss or gradient is not finite: it ends the run, or it is skipped."""
    threads: int = 1
    """CPU threads per rank."""
    timeout_s: float = 300.0
    """Seconds that a rank waits for the others before it gives up."""
    transport: Literal["auto", "native", "p2p", "shm"] = "auto"
    """What carries collectives between ranks of a host; auto: the one measured to be fastest."""
    tensorboard: bool = False
    """Whether metrics are written for TensorBoard as well."""
    prompt: str = "It is a truth"
    """The text that the trained model continues at the end of the run."""
    sample_tokens: int = 80
    """Tokens that it generates; 0: none."""

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
                f"leaves no step of train.steps = {self.steps} after the warm-up",
                "use fewer",
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
        """Peak learning rate at this global batch, in sequences: lr x (global_batch / lr_base_batch), linear (Goyal
        et al. 2017), or x its square root (Krizhevsky 2014)."""
        if self.lr_scaling == "none" or not self.lr_base_batch:
            return self.lr
        ratio = global_batch / self.lr_base_batch
        return self.lr * (ratio if self.lr_scaling == "linear" else ratio**0.5)
