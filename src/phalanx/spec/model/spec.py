"""The model: its shape, and the ONE list of its parameters.

    forward: embed, blocks.0, blocks.1, ..., head        the units of a model, in order
    block:   norm1, attention, norm2, mlp                the mlp may be a mixture of experts

Every user of a model's parameters (initialisation, buckets, sharding, checkpoints, memory, parameter counts) reads
`parameters(spec)`; there is no second list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Annotated, Literal

from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.block import stream_norm
from phalanx.spec.model.blocks.gemma3n import AltUpSizes, LayerEmbeddingSizes
from phalanx.spec.model.blocks.lowering import Mixer, architecture, require_pattern
from phalanx.spec.model.blocks.operators import GATED, Attend, Dim, Role, Router, Weight, whole
from phalanx.spec.model.mechanisms import MOST_LAYERS, Experts, Latent, Multipliers, RopeScaling, Width
from phalanx.spec.ranges import Count, Name, Range, require_ranges


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Sizes are counts of elements.

    Raises InputError for sizes below 1, and for fields that contradict each other.
    """

    family: Name
    """The architecture, a row of families.py: provides defaults of other fields and the weight format of
    `transformers`."""
    vocab: Width
    """Tokens in the vocabulary."""
    hidden: Annotated[int, Range(1, 10**6)]
    """Width of the residual stream."""
    layers: Annotated[int, Range(1, MOST_LAYERS)]
    """Blocks."""
    heads: Annotated[int, Range(1, 10**5)]
    """Query heads."""
    kv_heads: Annotated[int, Range(1, 10**5)]
    """Key and value heads, a divisor of `heads`: fewer is grouped-query attention (Ainslie et al. 2023)."""
    head_dim: Annotated[int, Range(1, 10**5)]
    """Width of a query or key head."""
    ffn: Width
    """Width inside the MLP."""
    max_seq: Count
    """The longest sequence, in tokens."""
    norm: Literal["rms", "layer"]
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm."""
    norm_eps: Annotated[float, Range(1e-30, 1)]
    """Added to a norm's mean square or variance; positive."""
    position: Literal["rotary", "learned", "none"]
    """Rotary positions (Su et al. 2021), a learned table of `max_seq` rows, or none in the stream (ALiBi adds them to
    attention's logits; Mamba needs none)."""
    activation: Literal["swiglu", "swiglu_clamped", "geglu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
    """Activation of the MLP. swiglu and geglu are gated: a third matrix; swiglu_clamped is gpt_oss's; gelu_tanh
    approximates gelu; relu2 is the square of relu (So et al. 2021); xielu is Apertus's."""
    qkv_bias: bool
    """Whether the query, key and value projections have biases."""
    out_bias: bool
    """Whether attention's output projection has a bias."""
    mlp_bias: bool
    """Whether the MLP's matrices have biases."""
    tied: bool
    """Whether the head reuses the embedding's matrix."""
    rope_theta: Annotated[float, Range(1e-6, 1e18)] = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary frequencies for longer sequences; None: no scaling."""
    norm_bias: bool = True
    """Whether LayerNorm has biases; RMSNorm has none."""
    norm_weights: bool = True
    """Whether norms of the residual stream have weights (not in OLMo and nanochat)."""
    embed_norm: bool = False
    """Whether the embedding's rows are normed (BLOOM)."""
    head_bias: bool = False
    """Whether the head has a bias for each token of the vocabulary (Phi, GPT-J)."""
    residual: Literal["serial", "parallel", "parallel_one_norm"] = "serial"
    """serial: the MLP follows attention. parallel: both read the block's input, through a norm each.
    parallel_one_norm: through one norm."""
    rotary_dim: Width | None = None
    """Rotated dimensions of a head, even; None: all."""
    rope_neighbours: bool = False
    """Whether rotary positions turn neighbouring dimensions as pairs, instead of those half of them apart."""
    qk_norm: bool = False
    """Whether queries and keys are normed."""
    qk_norm_over: Literal["head", "each", "all", "plain"] = "head"
    """head: over each head, with one weight for all. each: with weights of its own (Cohere). all: over all heads at
    once (OLMo 2). plain: over each head, without weights (Llama 4)."""
    norms: Literal["before", "after", "both"] = "before"
    """Norms of the residual stream: before a sublayer, of what it adds (OLMo 2), or both (Gemma 2)."""
    output_gate: bool = False
    """Whether a sigmoid of the token multiplies attention's result (Qwen3-Next)."""
    output_gate_over: Literal["element", "head"] = "element"
    """element: a gate of its own for each element of the result. head: one for each head (LFM3, Laguna)."""
    window: Count | None = None
    """Sliding window: the tokens that a token attends to, itself included. None: all before it."""
    window_layers: tuple[Annotated[int, Range(0, MOST_LAYERS)], ...] | None = None
    """Blocks, from 0, that have the window; None: all."""
    sinks: bool = False
    """Attention sinks: whether each head has a learned logit that takes weight from the tokens."""
    experts: Experts | None = None
    """A mixture of experts in place of the MLP; None: all blocks are dense."""
    latent: Latent | None = None
    """Multi-head latent attention; None: each head's keys and values are projected from the token."""
    streams: Annotated[int, Range(1, 64)] = 1
    """Residual streams that hyper-connections mix (Zhu et al. 2024); 1: a plain residual."""
    mixers: tuple[Mixer, ...] = ()
    """Further mechanisms, or the model's own in other sizes, by the names that `pattern` uses."""
    multipliers: Multipliers | None = None
    """Constant factors of a family's forward pass; None: there are none."""
    only_priced: tuple[Annotated[str, Name], ...] = ()
    """Features of the model that our decoder lacks, without parameters or a cost of note, such as a softcap of
    logits: such a model is priced, and refused where it would run."""
    unquantised: tuple[Annotated[str, Name], ...] = ()
    """Modules that a checkpoint of fewer than 16 bits keeps in 16, as wildcards of transformers' names; or, behind
    `!`, the only modules with fewer. The embedding and the head are always in 16."""
    pattern: tuple[Name, ...] | None = None
    """Sublayers of each block, joined by `+`, or by `&` where the second reads the first's normed input: attention,
    mlp, experts, or names of `mixers`, such as ("delta+experts", "delta+experts", "delta+experts",
    "attention+experts"). `attention:after` has its norms elsewhere than `norms` says. A shorter pattern repeats.
    None: all blocks are attention, then the MLP or experts."""

    def __post_init__(self) -> None:
        require_ranges(self, "model")
        # Positions and heads.
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise InputError(
                "model.rope_theta", self.rope_theta, "must be above 1 with yarn, which divides by its log"
            )
        if self.heads % self.kv_heads:
            remedy = f"use a divisor of {self.heads}"
            raise InputError("model.kv_heads", self.kv_heads, f"does not divide heads = {self.heads}", remedy)
        rotary_field = "latent.rope_dim" if self.latent else "head_dim" if self.rotary_dim is None else "rotary_dim"
        if self.position == "rotary" and self.rotary_width % 2:
            reason = "rotary positions turn pairs of dimensions"
            raise InputError(f"model.{rotary_field}", self.rotary_width, reason, "use an even one")
        if self.rotary_dim is not None and not 2 <= self.rotary_dim <= self.head_dim:
            raise InputError("model.rotary_dim", self.rotary_dim, f"is not between 2 and head_dim = {self.head_dim}")
        # Lists of layers.
        if self.window_layers is not None and self.window is None:
            raise InputError("model.window_layers", list(self.window_layers), "needs model.window")
        self._check_layers("window_layers", self.window_layers or ())
        self._check_layers("experts.dense_layers", self.experts.dense_layers if self.experts else ())
        # Experts.
        if self.experts and self.residual != "serial":
            raise InputError("model.residual", self.residual, "experts need a serial residual", "use serial")
        if self.experts and not self.gated and self.activation != "relu2":
            raise InputError("model.activation", self.activation, "experts need a gated activation", "use swiglu")
        require_pattern(self)
        # Latent attention.
        if self.latent and self.latent.nope_dim + self.latent.rope_dim != self.head_dim:
            reason = f"is not latent.nope_dim + rope_dim = {self.latent.nope_dim} + {self.latent.rope_dim}"
            raise InputError("model.head_dim", self.head_dim, reason)
        if self.latent:
            for name, needed in (
                ("kv_heads", (self.heads,)),
                ("position", ("rotary", "none")),
                ("qk_norm", (False,)),
            ):
                if getattr(self, name) not in needed:
                    reason = f"latent attention needs {' or '.join(map(str, needed))}"
                    raise InputError(f"model.{name}", getattr(self, name), reason)
        elif self.rope_scaling is not None and self.rope_scaling.mscale_all_dim:
            reason = "belongs to latent attention, which this model does not have"
            raise InputError("model.rope_scaling.mscale_all_dim", self.rope_scaling.mscale_all_dim, reason)

    def _check_layers(self, name: str, blocks: tuple[int, ...]) -> None:
        outside = [i for i in blocks if not 0 <= i < self.layers]
        if outside:
            raise InputError(f"model.{name}", outside[0], f"is not a layer: there are {self.layers}, numbered from 0")

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    @property
    def core_dim(self) -> int:
        """Width of a head in attention's core: the wider of keys and values."""
        return self.head_dim if self.latent is None else max(self.head_dim, self.latent.v_dim)

    @property
    def rotary_width(self) -> int:
        """Number of rotated dimensions of a head."""
        if self.latent is not None:
            return self.latent.rope_dim
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate in addition to its first product."""
        return self.activation in GATED

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer, in tokens; None: a token attends to all before it."""
        if self.pattern is not None:
            attend = architecture(self).blocks[layer].first(Attend)
            return attend.window if attend is not None else None
        return self.window if self.window_layers is None or layer in self.window_layers else None

    @property
    def held_blocks(self) -> tuple[int, ...]:
        """The blocks, by number: all of the model's, or a pipeline rank's."""
        return tuple(range(self.layers))

    def masked(self, seq: int) -> bool:
        """Whether `seq` tokens exceed the sliding window of some layer, so that its attention needs a mask."""
        return any((w := self.window_of(i)) is not None and w < seq for i in self.held_blocks)

    @cached_property
    def parameter_count(self) -> int:
        """Parameters, each counted once."""
        return sum(p.numel for p in parameters(self))

    @cached_property
    def active_count(self) -> int:
        """Parameters that one token uses: of a layer's experts, top_k."""
        chosen = {f"blocks.{i}": b.first(Router) for i, b in enumerate(architecture(self).blocks)}
        count = 0
        for p in parameters(self):
            router = chosen.get(p.unit) if p.of_experts else None
            all_of_them = router.count + router.identity if router else 1
            count += p.numel * router.top_k // all_of_them if router else p.numel
        return count


MODEL_FIELDS = tuple(f.name for f in fields(ModelSpec))
"""The names of ModelSpec's fields, without those that StageSpec adds."""


@dataclass(frozen=True)
class StageSpec(ModelSpec):
    """A pipeline rank's part of a model. All sizes, including `layers`, are the full model's."""

    chunks: tuple[tuple[str, ...], ...] = ()
    """Units of each chunk on the rank, in forward order."""

    @property
    def held_blocks(self) -> tuple[int, ...]:
        """The blocks of this stage, by number."""
        return blocks_among(units(self))

    @property
    def model(self) -> ModelSpec:
        """The full model."""
        return ModelSpec(**{name: getattr(self, name) for name in MODEL_FIELDS})

    @classmethod
    def of(cls, model: ModelSpec, chunks: tuple[tuple[str, ...], ...]) -> StageSpec:
        """Return the stage of `model` with these chunks."""
        return cls(**{name: getattr(model, name) for name in MODEL_FIELDS}, chunks=chunks)


@dataclass(frozen=True)
class Parameter:
    """One logical parameter: its single-process name, global shape, role and unit.

    Matrices are (out, in), as torch.nn.Linear has them.
    """

    fqn: str
    """Fully qualified name, such as `blocks.0.attention.q.weight`."""
    shape: tuple[int, ...]
    """Shape before any split over ranks."""
    role: Role
    """Role in the model."""
    unit: str
    """Unit: `embed`, `blocks.i` or `head`; `model` for a tied embedding, used by two units."""
    dims: tuple[Dim, ...] = field(default=(), repr=False, compare=False)
    """The dimensions of `shape`, with the mesh axis that divides each."""

    @cached_property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @cached_property
    def of_experts(self) -> bool:
        """Whether the first dimension counts experts."""
        return self.role.startswith("expert")

    @property
    def matrices(self) -> int:
        """Number of hidden-layer matrices: one, or one per expert; 0 for embeddings, head, norms, biases and
        routers."""
        if self.role not in ("column", "row", "latent", "expert_column", "expert_row"):
            return 0
        return self.shape[0] if self.of_experts else 1


def expert_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Return the blocks of the full model, by number, that have experts in place of the MLP."""
    return tuple(i for i, block in enumerate(architecture(spec).blocks) if block.first(Router) is not None)


def units(spec: ModelSpec) -> tuple[str, ...]:
    """Return the units in forward order (of a pipeline rank, its own), each run, and gathered by ZeRO-3, at once."""
    if isinstance(spec, StageSpec):
        return tuple(unit for chunk in spec.chunks for unit in chunk)
    return ("embed", *(f"blocks.{i}" for i in range(spec.layers)), "head")


def blocks_among(units: tuple[str, ...]) -> tuple[int, ...]:
    """Return the numbers of the blocks among these units."""
    return tuple(int(unit.split(".")[1]) for unit in units if unit.startswith("blocks"))


def chunks(spec: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Return the units of each chunk on the rank; a full model is one chunk."""
    return spec.chunks if isinstance(spec, StageSpec) else (units(spec),)


@cache
def parameters(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Return all logical parameters in forward order; for a pipeline rank, the parameters of its units."""
    # A pipeline rank has the parameters of its units.
    if isinstance(spec, StageSpec):
        of_stage = set(units(spec))
        if spec.tied and not of_stage.isdisjoint(("embed", "head")):
            of_stage.add("model")
        return tuple(p for p in parameters(spec.model) if p.unit in of_stage)
    model, h = architecture(spec), whole(spec.hidden)
    rows = [
        _parameter(
            Weight("embed.token.weight", (model.vocab, h), "embedding"), "", "model" if model.tied else "embed"
        )
    ]
    if model.learned_positions:
        rows.append(_parameter(Weight("embed.position.weight", (whole(spec.max_seq), h), "position"), "", "embed"))
    if spec.embed_norm:
        of_embed = stream_norm(spec.hidden, spec.norm, spec.norm_bias, "norm").weights
        rows += (_parameter(w, f"embed.{w.name}", "embed") for w in of_embed)
    for mixer in spec.mixers:
        if isinstance(mixer, LayerEmbeddingSizes | AltUpSizes):
            rows += (_parameter(w, f"embed.{w.name}", "embed") for w in mixer.table(spec.hidden, spec.layers))
    for i, block in enumerate(model.blocks):
        unit = f"blocks.{i}"
        rows += (_parameter(w, f"{unit}.{name}", unit) for name, w in block.weights())
    rows += (_parameter(w, f"head.{w.name}", "head") for w in (*model.end_weights, *model.last_norm.weights))
    if not model.tied:
        rows.append(_parameter(Weight("head.linear.weight", (model.vocab, h), "head"), "", "head"))
    if spec.head_bias:
        rows.append(_parameter(Weight("head.linear.bias", (model.vocab,), "head"), "", "head"))
    return tuple(rows)


def _parameter(w: Weight, fqn: str, unit: str) -> Parameter:
    return Parameter(fqn or w.name, tuple(d.size for d in w.shape), w.role, unit, w.shape)


def buffers(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Return the buffers that a model learns without gradients (experts' balance biases), in the form of
    parameters."""
    if spec.experts is None or spec.experts.balance_bias is None:
        return ()
    layers = [i for i in expert_layers(spec) if i in spec.held_blocks]
    shape = (spec.experts.count,)
    return tuple(Parameter(f"blocks.{i}.mlp.balance", shape, "balance", f"blocks.{i}") for i in layers)


def holds_one_tied_copy(spec: ModelSpec) -> bool:
    """Whether a pipeline rank holds exactly one of the two copies of a tied embedding."""
    of_stage = units(spec)
    return spec.tied and isinstance(spec, StageSpec) and ("embed" in of_stage) != ("head" in of_stage)


def is_head_copy(spec: ModelSpec, fqn: str) -> bool:
    """Whether `fqn` is the head's copy of a tied embedding, whose first copy is on another pipeline rank."""
    return isinstance(spec, StageSpec) and fqn == "embed.token.weight" and "embed" not in units(spec)
