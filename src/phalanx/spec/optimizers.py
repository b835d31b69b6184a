"""Optimizers: a job's constants ([job.optimizer]), and every fact about each optimizer in one table. State, prices,
steps, exports and refusals all read these facts. A row without one of them cannot be made.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.spec.ranges import Range, require_ranges

OptimizerName = Literal["sgd", "adamw", "muon"]
"""Names of optimizers; OPTIMIZERS has a row for each."""


COUNT_BYTES = 4
"""Bytes of a tensor's step count, in fp32."""


@dataclass(frozen=True)
class UpdateRule:
    """Update rule of one parameter."""

    moments: tuple[str, ...]
    """Tensors of state in addition to the master, of its type and shape, by torch's names."""
    needs_momentum: bool
    """Whether the moments exist only if the momentum is positive."""
    counts_steps: bool
    """Whether each tensor has a step count."""
    iterations: int
    """Newton-Schulz iterations X <- a X + (b A + c A A) X, A = X Xᵀ, that orthogonalise a matrix: the update of an
    element depends on all others, so that no shard can be updated alone. 0: by element."""

    @property
    def whole(self) -> bool:
        """Whether an update needs the whole parameter."""
        return self.iterations > 0

    def product_flops(self, rows: int, columns: int) -> int:
        """Return the FLOPs of the products of an update of one matrix: with n its shorter side and w its longer one,
        2 n² w for X Xᵀ, 2 n³ for A A and 2 n² w for the product with X, in every iteration."""
        n, w = min(rows, columns), max(rows, columns)
        return self.iterations * (4 * n * n * w + 2 * n**3)

    def held(self, momentum: float) -> tuple[str, ...]:
        """Return the names of the moments that exist with this momentum."""
        return self.moments if momentum or not self.needs_momentum else ()

    def passes(self, momentum: float) -> int:
        """Return the number of times that an update reads or writes each element of the master's type: master and
        moments both ways. The FLOPs per element are negligible."""
        return 2 * (1 + len(self.held(momentum)))


MUON_RMS = 0.2
"""Root mean square of an AdamW update, to which Muon scales its own (Liu et al. 2025, section 2.2)."""
_ADAMW = UpdateRule(("exp_avg", "exp_avg_sq"), needs_momentum=False, counts_steps=True, iterations=0)
_SGD = UpdateRule(("momentum_buffer",), needs_momentum=True, counts_steps=False, iterations=0)
_MUON = UpdateRule(("momentum_buffer",), needs_momentum=False, counts_steps=False, iterations=5)


@dataclass(frozen=True)
class OptimizerRow:
    """Every fact about an optimizer."""

    title: str
    matrices: UpdateRule
    """Rule of the matrices of hidden layers."""
    others: UpdateRule
    """Rule of embeddings, head, norms, biases and routers."""
    reads: tuple[str, ...]
    """Fields of `Optimizer` that have an effect."""
    momentum: float | None
    """Default decay of the momentum; None: betas[0]."""
    torch: str
    """torch's class. The names in frameworks are in their folders (frameworks/*/keys.toml, job.optimizer.name)."""

    @property
    def whole(self) -> bool:
        """Whether the update of some parameter needs it whole."""
        return self.matrices.whole or self.others.whole


OPTIMIZERS: dict[OptimizerName, OptimizerRow] = {
    "sgd": OptimizerRow(
        "SGD with momentum",
        matrices=_SGD,
        others=_SGD,
        reads=("betas", "momentum", "weight_decay"),
        momentum=None,
        torch="SGD",
    ),
    "adamw": OptimizerRow(
        "AdamW (Loshchilov & Hutter 2019)",
        matrices=_ADAMW,
        others=_ADAMW,
        reads=("betas", "eps", "weight_decay"),
        momentum=None,
        torch="AdamW",
    ),
    "muon": OptimizerRow(
        "Muon (Jordan et al. 2024; step size of Liu et al. 2025), AdamW for what is no matrix of a hidden layer",
        matrices=_MUON,
        others=_ADAMW,
        reads=("betas", "eps", "momentum", "weight_decay"),
        momentum=0.95,
        torch="Muon",
    ),
}

_Decay = Annotated[float, Range(0, 1, below=True)]


@dataclass(frozen=True)
class OuterOptimizer:
    """The update that brings replicas together which took steps alone (strategy.local): SGD, whose gradient is the
    mean over the replicas of the parameters before those steps minus the parameters after them. The defaults are
    DiLoCo's (Douillard et al. 2023, section 3.1); lr = 1 and momentum = 0 average the parameters (local SGD, Stich
    2019). Raises InputError for values out of range."""

    lr: Annotated[float, Range(0, 1e6, above=True)] = 0.7
    """The outer learning rate, constant over the run; positive."""
    momentum: _Decay = 0.9
    """Decay of the outer momentum; 0: none, and no state for it."""
    nesterov: bool = True
    """Whether the momentum is Nesterov's. Has no effect without momentum."""
    fragments: Annotated[int, Range(1, 10**4)] = 1
    """Parts of the model, of neighbouring blocks, that synchronise in turn, each once in strategy.local steps
    (Streaming DiLoCo, Douillard et al. 2025)."""
    delay: Annotated[int, Range(0, 10**6)] = 0
    """Steps that replicas take between sending a fragment's changes and applying their mean."""
    mix: Annotated[float, Range(0, 1)] = 0.0
    """Share of a replica's own parameters in those that it goes on from; the rest is the outer optimizer's."""

    def __post_init__(self) -> None:
        require_ranges(self, "job.outer")

    @property
    def apart(self) -> bool:
        """Whether replicas go on from other parameters than the outer optimizer's, so that it keeps its own."""
        return self.fragments > 1 or self.mix > 0

    def applied(self, step: int, local: int) -> int | None:
        """Return the fragment that is updated at the end of `step` of `local` steps, both from 0; None: none is."""
        count, rest = divmod((step + 1) * self.fragments, local)
        return None if rest else count - 1

    def sent(self, step: int, local: int) -> int | None:
        """Return the fragment whose changes are sent at the end of `step` of `local` steps; None: none is."""
        return self.applied(step + self.delay, local) if step + self.delay < local else None

    def cover(self, compressed: bool) -> int:
        """Return the number of steps, of `local`, whose compute hides the travel of changes. Compressed changes hide
        behind none: they have arrived when the step that sends them ends."""
        return 0 if compressed else self.delay * self.fragments

    def last_sent(self, local: int) -> int:
        """Return the last of `local` steps, from 0, that sends changes: the one in StepPrograms and records."""
        return max(local, 1) - 1 - self.delay


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of a job and its constants. Raises InputError for values out of range."""

    name: OptimizerName = "adamw"
    """The update rule."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Decay of AdamW's two moments, each in [0, 1)."""
    momentum: _Decay | None = None
    """Decay of the momentum of SGD and Muon. None: the first of `betas` for SGD, 0.95 for Muon."""
    eps: Annotated[float, Range(1e-30, 1)] = 1e-8
    """Added to the root of AdamW's second moment; positive."""
    weight_decay: Annotated[float, Range(0, 1e6)] = 0.1
    """Decoupled weight decay, of matrices only; not negative."""

    def __post_init__(self) -> None:
        require_ranges(self, "job.optimizer")

    @property
    def row(self) -> OptimizerRow:
        """The optimizer's row."""
        return OPTIMIZERS[self.name]

    @property
    def first_decay(self) -> float:
        """Decay of the momentum, resolved."""
        known = self.momentum if self.momentum is not None else self.row.momentum
        return self.betas[0] if known is None else known
