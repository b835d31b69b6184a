"""Options of training frameworks, beyond Strategy, that change the time or memory of a step.

A Strategy determines who holds and computes what. These options determine how a stack does it: number types,
offloading to the host, fusion and overlap. `auto`, the default of most, is the release's own behaviour (frameworks/
has its constants), so `StackOptions()` changes nothing. frameworks/ has the options of each stack,
cost/analytic/option_effects.py the effect of each.

In addition, Strategy itself has fields that other frameworks write as options: `recompute` (by module, by number of
blocks), `layers` (an explicit pipeline layout), `ulysses` (all-to-all context parallelism: a2a is ulysses=cp, a2a+p2p
is 1 < ulysses < cp).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.job import Job
from phalanx.spec.ranges import Natural, Range, Share, require_ranges
from phalanx.spec.strategy.spec import format_field

StackProducts = Literal["auto", "bfloat16", "float8-delayed", "float8", "float8-block", "mxfp8", "nvfp4"]
StateType = Literal["auto", "float32", "float16", "bfloat16", "float8"]


@dataclass(frozen=True)
class StackOptions:
    """Options of a training step beyond its Strategy. Raises InputError for a value outside its range."""

    first_stage_layers: Natural = 0
    """Blocks on the first pipeline rank, all of its chunks together; 0: as many as on the others."""
    last_stage_layers: Natural = 0
    """Blocks on the last pipeline rank; 0: as many as on the others."""
    embedding_as_layer: bool = False
    """Whether the embedding counts as a block where blocks are spread over chunks, so the first has one less."""
    loss_as_layer: bool = False
    """Whether the head with the loss counts as a block, so the last chunk has one less."""
    products: StackProducts = "auto"
    """Number format of matrix products. float8: one scale per tensor, of the current values; float8-delayed: of
    earlier steps; float8-block: one scale per 128 x 128 weights or 128 activations (DeepSeek-V3); mxfp8: one per
    32 elements (MXFP8); nvfp4: one per 16 (NVFP4). auto: the job's compute type."""
    narrow_parameters: Literal["auto", "on", "off"] = "auto"
    """Whether parameters are kept and gathered in the 8 (or 4) bits of the products."""
    first_moment: StateType = "auto"
    """Type of Adam's first moment."""
    second_moment: StateType = "auto"
    """Type of Adam's second moment."""
    master: Literal["auto", "float32", "float16"] = "auto"
    """Type of the parameters that the optimizer updates. float16: the 16 bits missing from bfloat16 parameters, kept
    separately (Megatron's --main-params-dtype fp16)."""
    gradients: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in which gradients are accumulated over micro-batches."""
    reduce: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in which gradients travel over the data axis."""
    optimizer: Literal["auto", "adam", "muon"] = "auto"
    """Update rule. auto: the job's. muon (Jordan et al. 2024): one moment for the matrices of blocks, whose
    orthogonalised update needs whole matrices; embedding and head stay with Adam."""
    update: Literal["auto", "fused", "foreach"] = "auto"
    """How AdamW is computed. fused: one kernel; foreach: torch's operations on all parameters at once, with
    temporaries as large as a moment."""
    optimizer_offload: Share = 0.0
    """Share of the optimizer's state, and of its update, on the host."""
    parameter_offload: bool = False
    """Whether sharded parameters (zero=3) are on the host between uses."""
    units: Literal["auto", "model", "remainder", "module"] = "auto"
    """Modules whose sharded parameters (zero=3) are gathered at once. auto: a block each; model: all in one;
    remainder: modules with `unit_size` parameters or more outside of the units inside them; module: with more in
    all."""
    unit_size: Annotated[int, Range(0, 10**15)] = 0
    """Parameters that make a module a unit, for `units` by size."""
    activation_offload: Natural = 0
    """Blocks per pipeline rank whose kept activations are offloaded to the host and back."""
    context: Literal["auto", "p2p", "all_gather"] = "auto"
    """Exchange of keys and values over the rest of cp (without ulysses): around a ring, or gathered before attention
    (Llama 3, Grattafiori et al. 2024, section 3.3.2)."""
    attention: Literal["auto", "flash", "flash2", "flash3", "flex", "unfused"] = "auto"
    """Attention's core. flash: one kernel, which never writes the scores, of the stack's own choice; flash2, flash3:
    that of FlashAttention 2 or 3; flex: torch's FlexAttention, which its compiler makes for a mask; unfused: products
    around a softmax, whose scores are kept for the backward pass (`eager` in transformers, `local` in Megatron)."""
    cross_entropy: Literal["auto", "plain", "native", "fused", "linear"] = "auto"
    """The loss. native: Megatron's own fusion, which keeps the softmax in fp32; fused: softmax and loss in a kernel,
    in the logits' own type; linear: with the head's product, in slices of the tokens, so that the full logits never
    exist (Liger, cut cross-entropy)."""
    document: Natural = 0
    """Mean tokens of a document where several are packed into a sequence and attention stays inside each (THD
    layout); 0: attention spans the sequence."""
    lora: Annotated[int, Range(0, 4096)] = 0
    """Rank of the adapters, which alone are trained (Hu et al. 2021); 0: all parameters are trained."""
    lora_targets: Literal["qkv", "attention", "linear", "experts"] = "linear"
    """Layers with adapters: those before attention, attention's, every linear layer but experts', or each expert's
    too."""
    dora: Literal["none", "on", "dropout"] = "none"
    """Whether norms of an adapted weight's rows are trained too, under `lora` (DoRA, Liu et al. 2024). dropout: with
    dropout before the adapters, whose input multiplies the frozen weight once more."""
    base: Literal["auto", "nf4", "nf4-double", "int8", "gptq", "float8"] = "auto"
    """Number format of the frozen weights of blocks under `lora`. auto: 16 bits; nf4: 4 bits with an fp32 scale for
    each 64; nf4-double: with 8-bit scales (QLoRA, Dettmers et al. 2023); int8: LLM.int8() (Dettmers et al. 2022);
    gptq: 4 bits with a scale and a zero for each 128 (Frantar et al. 2022); float8: as products in 8 bits with one
    scale per tensor read them, without a second copy in the backward pass's order."""
    reference: Literal["none", "copy", "base", "copy-kl", "base-kl"] = "none"
    """The reference model that scores each micro-batch in a forward pass too (DPO, Rafailov et al. 2023). copy: a
    frozen copy of the model, sharded as parameters are; base: the model without its adapters; -kl: both score as many
    further sequences, for the divergence between them (KTO, Ethayarajh et al. 2024)."""
    vocab_multiple: Annotated[int, Range(0, 10**6)] = 0
    """Number to a multiple of which the rows of each tp rank's part of the embedding and head are rounded up; 0: no
    rounding."""
    mtp: Annotated[int, Range(0, 16)] = 0
    """Depths of multi-token prediction (DeepSeek-V3, section 2.2): further blocks at the end, each with a product of
    twice the hidden size and the head once more."""
    tp_overlap: Literal["auto", "none", "async", "userbuffers"] = "auto"
    """Overlap of tensor-parallel collectives with products. none: what the stack hides without an option; async: cut
    into one part per rank by the compiler; userbuffers: by Transformer Engine."""
    dp_overlap: Literal["auto", "none", "reduce"] = "auto"
    """What overlaps compute over the data axis. none: nothing; reduce: the reduction of gradients with the last
    backward pass, and not the gather of parameters with the next forward pass."""
    bucket_elements: Annotated[int, Range(0, 10**12)] = 0
    """Gradients in a bucket, where a buffer holds them; 0: as the release has it."""
    bucket_buffers: Literal["auto", "none", "one", "two"] = "auto"
    """Buffers of a bucket each into which a backward pass copies gradients to be reduced: none, one, or two that take
    turns (DeepSpeed's contiguous_gradients, and overlap_comm)."""
    accumulate: Literal["auto", "sharded"] = "auto"
    """Where gradients of several micro-batches add up. auto: as the release has it; sharded: in shards, after a
    reduction each, so that whole gradients never stay."""
    dispatch: Literal["auto", "all_gather", "all_to_all", "deepep", "hybridep"] = "auto"
    """Transport of tokens to their experts."""
    overlap_experts: Literal["auto", "on", "off"] = "auto"
    """Whether the experts' all-to-alls of one micro-batch overlap the compute of another (DualPipe's forward and
    backward chunks, Megatron's --overlap-moe-expert-parallel-comm)."""
    routing: Literal["auto", "balanced", "learned"] = "auto"
    """How tokens spread over experts. balanced: every expert gets equally many, which benchmarks force and `auto`
    assumes; learned: the router's choices differ, and each block waits for the rank whose experts got the most."""
    graphs: Literal["auto", "none", "modules", "full"] = "auto"
    """What CUDA graphs launch. auto: what the release's own recipes let them; none: each kernel is launched by the
    host; modules: attention, routers and MLPs are captured; full: the whole iteration."""

    def __post_init__(self) -> None:
        require_ranges(self, "options")
        if self.dora != "none" and not self.lora:
            raise InputError("options.dora", self.dora, "is about adapters, and there are none", "add lora=16")

    def __str__(self) -> str:
        """Return the one-line form: only options that differ from their defaults; empty if none does."""
        changed = self.changed()
        return ",".join(f"{name}={format_field(value)}" for name, value in changed.items())

    def under(self, job: Job) -> StackOptions:
        """Return the options with the job's optimizer filled in, if it needs whole matrices and they leave it to the
        job."""
        if not job.optimizer.row.whole or self.optimizer != "auto":
            return self
        return replace(self, optimizer="muon")

    @property
    def state_on_host(self) -> bool:
        """Whether shards lie on the host, so that ZeRO's level is in effect with a single rank too."""
        return bool(self.optimizer_offload or self.parameter_offload)

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name."""
        return {name: value for name in OPTION_FIELDS if (value := getattr(self, name)) != DEFAULTS[name]}


AS_RELEASED = StackOptions()
"""Every option at the release's default."""
OPTION_FIELDS = {f.name: f for f in fields(StackOptions)}
DEFAULTS = {name: f.default for name, f in OPTION_FIELDS.items()}
STAGE_OPTIONS = ("first_stage_layers", "last_stage_layers", "embedding_as_layer", "loss_as_layer")
"""Options of how blocks are split over pipeline stages."""


_MEGATRON_WORDS = {("dispatch", "alltoall"): "all_to_all", ("dispatch", "allgather"): "all_gather"}
"""Values of an option in Megatron's words (--moe-token-dispatcher-type)."""


def parse(line: str) -> dict[str, Any]:
    """Parse `first_moment=bfloat16,optimizer_offload=0.5` into a table; types are checked when StackOptions are built
    from it. Raises InputError for an unknown option, a missing `=`, or an option named twice."""
    table: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in line.split(","))):
        name, equals, text = (part.strip() for part in item.partition("="))
        if not equals or not text:
            raise InputError("options", line, f"{item!r} is not of the form option=value", "e.g. master=float16")
        if name not in OPTION_FIELDS:
            raise InputError(f"options.{name}", text, "no such option", nearest(name, OPTION_FIELDS))
        if name in table:
            raise InputError(f"options.{name}", text, "is given twice")
        default, text = DEFAULTS[name], _MEGATRON_WORDS.get((name, text), text)
        table[name] = text if isinstance(default, str) else _number(name, text, default)
    return table


def _number(name: str, text: str, default: Any) -> Any:
    """Read the text of an option whose default is a bool, an int or a float."""
    if isinstance(default, bool):
        words = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
        if text.lower() not in words:
            raise InputError(f"options.{name}", text, "is neither 1 nor 0")
        return words[text.lower()]
    try:
        return type(default)(text)
    except ValueError:
        raise InputError(
            f"options.{name}", text, f"is not a{'n integer' if type(default) is int else ' number'}"
        ) from None
