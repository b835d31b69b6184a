"""What is exported: a plan, checked against the stack that is to run it.

The strategy is `canonical`, as a configuration of the stack can express it: fields without effect and fields that the
stack fixes are at their defaults, and a pipeline's blocks are listed only where chunks differ. Reading an export
gives exactly this strategy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from phalanx.frameworks.registry import facts, require_runnable
from phalanx.frameworks.stack import Stack
from phalanx.frameworks.stated_training import StatedTraining
from phalanx.schedule.pipeline.given_layout import equal_blocks
from phalanx.schedule.pipeline.stages import blocks_of, check, rank_of
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import COMPUTED, PRECISIONS
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.spec import FIELDS, Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, STAGE_OPTIONS, StackOptions, StackProducts

_COMPUTE = {f.name: f.title for f in COMPUTED if f.bits < 64}
PRODUCTS = {word: f.name for word, f in PRECISIONS.items() if f.narrow}
"""Number format of products by the precision of a plan."""


@dataclass(frozen=True)
class Subject:
    """A plan that a stack runs."""

    plan: Plan
    stack: Stack
    s: Strategy
    """The strategy in canonical form."""
    options: StackOptions
    """Options of the plan, with the format of products that its precision states."""
    compute: str
    """bf16, fp16 or fp32: the type of parameters and activations."""
    blocks: tuple[int, ...]
    """Blocks of each chunk; empty without a pipeline, and where options shape its first or last stage."""
    training: StatedTraining
    """Learning rate, steps and the like, of the file that the plan improves, else of its job."""

    @property
    def model(self) -> ModelSpec:
        return self.plan.model

    @property
    def job(self) -> Job:
        return self.plan.job

    @property
    def optimizer(self) -> Optimizer:
        """The job's optimizer, or Muon where the options say so."""
        return replace(self.job.optimizer, name="muon") if self.options.optimizer == "muon" else self.job.optimizer

    @property
    def cluster(self) -> ClusterSpec:
        return self.plan.cluster

    @property
    def rounded(self) -> bool:
        """Whether products of fp32 are in TF32."""
        return self.plan.choices.get("precision") == "tf32"

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node that take part."""
        return min(self.s.world, self.cluster.ranks_per_node)

    @property
    def nodes(self) -> int:
        return self.s.world // self.gpus_per_node

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step and replica."""
        return self.s.accumulation(self.job)

    @property
    def even(self) -> bool:
        """Whether every chunk has the same number of blocks."""
        return len(set(self.blocks)) <= 1

    def schedule_in(self, words: Mapping[str, str], otherwise: str) -> str:
        """Return a framework's word for the schedule of the learning rate. `words`: schedule -> word; `otherwise`:
        its word for any other schedule."""
        return words.get(self.training.schedule or "", otherwise)

    @property
    def final_lr_share(self) -> float:
        """Learning rate at the end of its decay, as a share of its peak; 0 where the training states none."""
        t = self.training
        return t.min_lr / t.lr if t.lr and t.min_lr else 0.0

    @property
    def final_lr(self) -> str:
        """Learning rate at the end of its decay."""
        return f"{self.training.min_lr or 0.0:g}"


def require_plain(m: ModelSpec, title: str) -> None:
    """Require a model that every framework has arguments for: blocks of attention and an MLP or experts, norms with
    weights, one residual stream, nothing else. Raises InputError."""
    latent, experts = m.latent, m.experts
    for name, plain in (
        ("pattern", m.pattern is None),
        ("norms", m.norms == "before"),
        ("norm_weights", m.norm_weights),
        ("embed_norm", not m.embed_norm),
        ("head_bias", not m.head_bias),
        ("streams", m.streams == 1),
        ("output_gate", not m.output_gate),
        ("output_gate_over", m.output_gate_over == "element"),
        ("only_priced", not m.only_priced),
        ("position", m.position != "none"),
        ("activation", m.activation not in ("geglu", "relu", "relu2", "xielu")),
        ("qk_norm_over", not m.qk_norm or m.qk_norm_over == "head"),
        ("latent.index", latent is None or latent.index is None),
        ("experts", experts is None or not (experts.latent or experts.shared_gate)),
    ):
        if not plain:
            raise InputError(f"model.{name}", None, f"is not exported to {title}", "use another model")


def subject(plan: Plan, stack: Stack, training: StatedTraining | None = None) -> Subject:
    """Return a plan for an export to a stack. `training`: of the file that the plan improves. Raises InputError for a
    plan that the stack does not run."""
    s = plan.strategy
    per_node = plan.cluster.ranks_per_node
    if s.world > per_node and s.world % per_node:
        reason = f"its {s.world} ranks do not fill nodes of {per_node} GPUs"
        raise InputError("strategy", str(s), reason, f"use a multiple of {per_node}")
    check(s, plan.model, plan.job, None)
    compute = _COMPUTE.get(plan.job.precision.compute)
    if compute is None:
        remedy = f"use {', '.join(_COMPUTE)}"
        raise InputError("job.precision.compute", plan.job.precision.compute, "is not a type of this export", remedy)
    precision = str(plan.choices.get("precision", compute))
    options, operands = plan.options.under(plan.job), plan.job.precision.operands
    if "vocab_multiple" not in stack.options:  # it leaves the rows as they are
        options = replace(options, vocab_multiple=0)
    products = PRODUCTS.get(precision, operands.name if operands else None)
    if products is not None:
        if options.products not in ("auto", products):
            reason = f"contradicts products in {products} of the plan"
            raise InputError("options.products", options.products, reason, "leave one of them out")
        if products not in get_args(StackProducts):
            raise InputError(
                "job.precision.products", products, f"{stack.title} has no such products", "leave it out"
            )
        options = StackOptions(**options.changed() | {"products": products})
    elif precision in _COMPUTE.values():
        compute = precision
    if s.compressor is not None and "none" in (stack.strategy["compression"].values or ()):
        raise InputError("strategy.compression", s.compression, f"{stack.title} has none", "use compression=none")
    require_runnable(stack, s, options, facts(plan.model, plan.job, s))
    for name in stack.fields_in_code:
        if (degree := getattr(s, name)) > 1:
            reason = f"is {stack.strategy[name].written} in a program's code, in no configuration of {stack.title}"
            raise InputError(f"strategy.{name}", degree, reason, f"use {name}=1")
    if plan.job.documents == "dynamic" and not stack.dynamic_context:
        reason = f"{stack.title} has no context parallelism of changing width"
        raise InputError("job.documents", "dynamic", reason, "plan with --lengths ...+packed")
    if s.pp == 1:  # without effect
        options = StackOptions(**{n: v for n, v in options.changed().items() if n not in STAGE_OPTIONS})
    shaped = [name for name in STAGE_OPTIONS if getattr(options, name)]
    if shaped and s.layers != "auto":
        reason = "contradicts the blocks that strategy.layers lists"
        raise InputError(f"options.{shaped[0]}", getattr(options, shaped[0]), reason, "leave one of them out")
    blocks = _blocks(plan) if s.pp > 1 and not shaped else ()
    return Subject(
        plan, stack, canonical(s, stack, blocks, options), options, compute, blocks, training or _of_job(plan)
    )


def _of_job(plan: Plan) -> StatedTraining:
    """Return the training of the plan's job file; its learning rate decays as a cosine."""
    t = plan.train
    if not t.name:
        return StatedTraining(seed=t.seed)
    lr = t.scaled_lr(plan.job.global_batch)
    saved = t.save_every or None
    return StatedTraining(lr, t.min_lr_ratio * lr, t.warmup, "cosine", saved, t.steps, seed=t.seed)


def _blocks(plan: Plan) -> tuple[int, ...]:
    """Return the blocks of each chunk: those that the strategy lists, else those that the plan was priced with;
    without a price, equal numbers where they divide evenly."""
    s, layers = plan.strategy, plan.model.layers
    chunks = len(rank_of(s))
    planned = (plan.choices.get("chunks") or {}).get("blocks") if s.layers == "auto" else None
    if planned and len(planned) == chunks and sum(planned) == layers:
        return tuple(planned)
    if s.layers == "auto" and layers % chunks == 0:
        return equal_blocks(layers, chunks)
    return blocks_of(plan.model, s)


def canonical(
    s: Strategy, stack: Stack, blocks: tuple[int, ...] = (), options: StackOptions = AS_RELEASED
) -> Strategy:
    """Return a strategy as a configuration of a stack can express it: fields without effect (a schedule without a
    pipeline, ZeRO of one replica) and fields that the stack fixes or has no key for are at their defaults. `blocks`:
    of each chunk."""
    changes: dict[str, Any] = {}
    for name, entry in stack.strategy.items():
        if not entry.written and name not in ("dp", "schedule"):
            changes[name] = FIELDS[name].default
    if s.shards == 1:
        changes |= {"zero": s.zero if options.state_on_host else 0, "shard": None}
        if options.state_on_host and not s.level.state and stack.refusal(replace(s, zero=1), options) is None:
            changes["zero"] = 1  # what is on the host is there as shards
    elif s.shard == s.dp or not s.level.state:
        changes["shard"] = None
    if s.pp == 1:
        changes |= {"schedule": "1f1b", "virtual": 1, "layers": "auto"}
    elif blocks and stack.strategy["layers"].values is None:
        listed = len(set(blocks)) > 1
        changes["layers"] = "/".join(map(str, blocks)) if listed else "auto"
    if s.pp == 1 or s.dp == 1:
        changes["order"] = "pp/dp/cp/tp"
    if s.recompute == "selective:core_attn":
        changes["recompute"] = "selective"
    return replace(s, **changes)
