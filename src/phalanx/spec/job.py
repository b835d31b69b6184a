"""The job: the computation of a step, independent of the layout ([job]); and the conduct of a run ([train])."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal, cast, get_args

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.number_formats import NUMBER_FORMATS, NumberFormat
from phalanx.spec.optimizers import Optimizer, OuterOptimizer
from phalanx.spec.ranges import Count, FilePath, Length, Name, Natural, Range, Share, require_ranges

DType = Literal["float64", "float32", "bfloat16", "float16"]
Transport = Literal["native", "p2p", "shm"]
"""What carries collectives. native: torch's backend (Gloo, NCCL). p2p: our schedules over sends and receives. shm:
shared memory."""


def is_algorithm_file(name: str) -> bool:
    """Whether a collective's algorithm is named by a file (schedule/collectives/algorithm_file.py), which has one
    number of ranks."""
    return name.endswith(".json")


def compute_type(word: str, field: str) -> DType:
    """Return `word` as a type to compute in. Raises InputError naming `field` for any other word."""
    for known in get_args(DType):
        if known == word:
            return cast(DType, known)
    raise InputError(field, word, "is not a type to compute in", nearest(word, get_args(DType)))


DTYPE_BYTES: dict[str, int] = {f.name: f.bits // 8 for f in NUMBER_FORMATS.values() if not f.narrow}
"""Bytes per element of number types, and of the integers sent by collectives."""


Products = Literal["compute", "float8", "float8-row", "mxfp8", "nvfp4"]
"""Operand formats of the matrix products of blocks: the compute type, or one of NUMBER_FORMATS that our runtime
multiplies."""


def widest(*dtypes: DType) -> DType:
    """Return the type for sums of these types: float64 if one of them is, else float32."""
    return "float64" if "float64" in dtypes else "float32"


@dataclass(frozen=True)
class Precision:
    """Number types of a step (Micikevicius et al. 2018). None means float32, or float64 if `compute` is float64."""

    compute: DType = "float32"
    """Type of parameters, activations and their gradients in the forward and backward pass."""
    reduce: DType | None = None
    """Type of gradients in the collectives that sum them over ranks."""
    accumulate: DType | None = None
    """Type of gradients summed over micro-batches."""
    master: DType | None = None
    """Type of the parameters that the optimizer updates, and of its state."""
    products: Products = "compute"
    """Format of the operands of matrix products in blocks: the compute type, or float8 with one scale per tensor,
    float8-row with one per row, mxfp8 and nvfp4 with one per block of 32 and 16 numbers. Needs compute =
    "bfloat16"."""
    gather: Literal["compute", "float8"] = "compute"
    """Format in which zero=3 (parameters) and sp (tokens, gradients) gather operands of blocks' products: the compute
    type, or the 8 bits of products = "float8", which it requires. Parameters arrive bitwise equal; tokens are rounded
    once, with one scale for all ranks."""

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

    @property
    def operands(self) -> NumberFormat | None:
        """Narrow format of the operands of blocks' products; None: the compute type."""
        return None if self.products == "compute" else NUMBER_FORMATS[self.products]

    @property
    def gathers_narrow(self) -> bool:
        """Whether operands of blocks' products are gathered in 8 bits."""
        return self.gather == "float8"


@dataclass(frozen=True)
class Job:
    """The computation of one training step. Raises InputError for numbers out of their ranges."""

    global_batch: Count
    """Sequences per step, over all replicas and micro-batches."""
    seq: Count
    """Tokens per sequence."""
    precision: Precision = field(default_factory=Precision)
    """Number types."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """Update rule and its constants; the learning rate is in [train]."""
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)
    """The update of replicas that take steps alone; has no effect without strategy.local."""
    clip: Annotated[float, Range(0, 1e30)] = 1.0
    """The largest global gradient norm; larger gradients are scaled down to it. 0: no clipping."""
    documents: Literal["packed", "separate", "whole", "balanced", "padded", "dynamic"] = "packed"
    """Treatment of the documents in a sequence. packed: as one text. separate: attention stays inside a document and
    positions restart with each. The loss counts every target either way, also the first token of a document. whole:
    as separate, but sequences hold whole documents, as many as fit, and padding; the loss counts targets inside
    documents. balanced: these, dealt so that ranks and micro-batches that meet have as much attention. padded: one
    document a sequence. dynamic: a document over just as many ranks of dp and cp as hold it, which other frameworks
    run; ours does not."""

    def __post_init__(self) -> None:
        require_ranges(self, "job")

    @property
    def separate(self) -> bool:
        """Whether attention stays inside documents."""
        return self.documents != "packed"

    @property
    def batch_rows(self) -> int:
        """Numbers of a batch for each token: its id, with separate documents its place in one, and with whole ones
        the id as a target, or -1."""
        return {"packed": 1, "separate": 2}.get(self.documents, 3)

    @property
    def outer_bytes(self) -> int:
        """Bytes per parameter that the outer optimizer keeps: its value at the last synchronisation, and momentum."""
        return (1 + (self.outer.momentum > 0)) * DTYPE_BYTES[self.precision.master_dtype]

    @property
    def under_way_bytes(self) -> float:
        """Bytes per parameter of changes that travel while replicas take further steps."""
        return bool(self.outer.delay) * DTYPE_BYTES[self.precision.accumulate_dtype] / self.outer.fragments

    @property
    def outer_traffic(self) -> int:
        """Bytes per parameter that runtime/data_parallel/outer.py reads and writes in a synchronisation: of masters,
        copies and momentum, and of changes."""
        momentum, p = self.outer.momentum > 0, self.precision
        nesterov = momentum and self.outer.nesterov
        of_masters, of_changes = 6 + 5 * momentum + 2 * nesterov + (self.outer.mix > 0), 4 + nesterov
        return of_masters * DTYPE_BYTES[p.master_dtype] + of_changes * DTYPE_BYTES[p.accumulate_dtype]


def require_folder_name(field: str, name: str) -> None:
    """Require that `name` is a valid name of a run's folder in runs/: letters, digits and `_.+-`, 200 bytes at most,
    which leaves room for the time stamp of a folder that is moved aside. Raises InputError."""
    if not re.fullmatch(r"[\w][\w.+-]*", name):
        raise InputError(field, name, "must be a plain folder name")
    if len(name.encode()) > 200:
        raise InputError(field, name, f"has {len(name.encode()):,} bytes", "use at most 200")


@dataclass(frozen=True)
class Train:
    """Conduct of a run: data, learning rate, evaluation, saving. Raises InputError for bad values."""

    data: FilePath = "austen"
    """Training text: `austen` (ships with Phalanx), a text file, .jsonl or .json, a folder of these, or token ids as
    a flat .bin or as the common name of Megatron's .bin and .idx."""
    tokenizer: FilePath = ""
    """A tokenizer.json for texts. Empty: the one in the folder of `weights`, else one is trained on the text."""
    end_of_text: Name | int = ""
    """The token between documents, by name or id. Empty: the tokenizer's own, if known."""
    text_field: Name = "text"
    """The field of .jsonl and .json objects that holds the text."""
    data_dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """The type of token ids in a flat .bin."""
    name: Name = ""
    """The run's folder in runs/. Empty: the job file's name without its suffix."""
    weights: FilePath = ""
    """Initial weights: a Hugging Face folder or file, or a run's folder. Empty: drawn at random from `seed`."""
    lr: Annotated[float, Range(0, 1e6, above=True)] = 1e-3
    """Peak learning rate, before `lr_scaling`; positive."""
    min_lr_ratio: Share = 0.1
    """The final learning rate of the cosine decay as a fraction of the peak, in [0, 1]."""
    warmup: Natural = 0
    """Steps of linear warm-up, fewer than `steps`."""
    steps: Count = 100
    """Optimizer steps of the run."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scaling of the learning rate with global_batch / lr_base_batch (`scaled_lr`)."""
    lr_base_batch: Count | None = None
    """The global batch, in sequences, that `lr` was tuned for; needed by `lr_scaling`."""
    seed: Annotated[int, Range(0, 2**63, below=True)] = 0
    """Seed of initial weights and of the order of the data; below 2^63."""
    eval_every: Natural = 0
    """Steps between evaluations on held-out sequences; 0: only after the last step."""
    eval_batches: Natural = 0
    """Global batches per evaluation; 0: all held-out sequences."""
    save_every: Natural = 0
    """Steps between checkpoints; 0: only after the last step."""
    keep: Count = 2
    """Checkpoints kept; older ones are deleted."""
    check_sync: Natural = 0
    """Steps between comparisons of the replicas' parameters, bit for bit; 0: never."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """Handling of a step whose loss or gradient is not finite: it ends the run, or it is skipped."""
    threads: Annotated[int, Range(1, 1024)] = 1
    """CPU threads per rank."""
    timeout_s: Annotated[float, Range(0, 1e6, above=True)] = 300.0
    """Seconds that a rank waits for the others before it gives up."""
    transport: FilePath = "auto"
    """Transport of collectives between ranks of a host: native, p2p, shm; auto: the fastest measured one; or a JSON
    file with an algorithm (schedule/collectives/algorithm_file.py) for one operation in groups of its ranks."""
    compile: Literal["none", "blocks"] = "none"
    """Whether torch.compile makes one graph of each block. Supports models without experts and strategies of only dp
    and zero, with full recomputation or none; the first step of a process, which is recorded and verified, runs
    uncompiled."""
    tensorboard: bool = False
    """Whether metrics are written for TensorBoard as well."""
    prompt: Annotated[str, Length(10**6)] = "It is a truth"
    """The text that the trained model continues at the end of the run."""
    sample_tokens: Annotated[int, Range(0, 10**6)] = 80
    """Tokens that it generates; 0: none."""

    def __post_init__(self) -> None:
        require_ranges(self, "train")
        if self.transport not in ("auto", *get_args(Transport)) and not is_algorithm_file(self.transport):
            known = nearest(self.transport, ("auto", *get_args(Transport), "FILE.json"))
            raise InputError("train.transport", self.transport, "is not a transport", known)
        if self.warmup >= self.steps and self.warmup:
            reason = f"leaves no step of train.steps = {self.steps} after the warm-up"
            raise InputError("train.warmup", self.warmup, reason, "use fewer")
        if not self.data:
            raise InputError("train.data", self.data, "is empty", "name a text file, a folder, or austen")
        if self.lr_scaling != "none" and not self.lr_base_batch:
            remedy = "set train.lr_base_batch (sequences)"
            raise InputError("train.lr_scaling", self.lr_scaling, "needs the batch that lr was tuned for", remedy)
        if self.name:
            require_folder_name("train.name", self.name)

    def scaled_lr(self, global_batch: int) -> float:
        """Return the peak learning rate at this global batch, in sequences: lr x (global_batch / lr_base_batch),
        linear (Goyal et al. 2017), or scaled by its square root (Krizhevsky 2014)."""
        if self.lr_scaling == "none" or not self.lr_base_batch:
            return self.lr
        ratio = global_batch / self.lr_base_batch
        return self.lr * (ratio if self.lr_scaling == "linear" else ratio**0.5)
