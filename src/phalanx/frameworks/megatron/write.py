"""A plan as a command line of Megatron-LM's pretrain_gpt.py, under Megatron-Core or Megatron-FSDP."""

from __future__ import annotations

import math
from typing import Any

from phalanx.frameworks.keys import key_table, optimizer_word
from phalanx.frameworks.megatron import layout, patterns, write_blocks
from phalanx.frameworks.megatron.write_model import model_settings
from phalanx.frameworks.writing import blanks as common
from phalanx.frameworks.writing import reasons
from phalanx.frameworks.writing.program import Blank, Group, Setting, TrainingProgram, Variable, settings
from phalanx.frameworks.writing.script import TORCHRUN
from phalanx.frameworks.writing.subject import Subject
from phalanx.spec.errors import InputError
from phalanx.spec.optimizers import MUON_RMS
from phalanx.spec.strategy import recompute as recomputation

KEYS = key_table("megatron")
_FUSIONS = KEYS.values("options.cross_entropy")


def program(x: Subject) -> TrainingProgram:
    """Return a plan as Megatron-LM's arguments. Raises InputError for a part of the plan that no argument
    expresses."""
    trainer = "pretrain_hybrid.py" if write_blocks.blocks_of(x.model).symbols else "pretrain_gpt.py"
    return TrainingProgram(
        x.stack.title,
        groups(x),
        f'exec {TORCHRUN} \\\n  "$MEGATRON/{trainer}" "${{ARGUMENTS[@]}}"',
        variables(x),
        blanks(x),
        arguments=True,
    )


def groups(x: Subject) -> tuple[Group, ...]:
    """Return all arguments, group by group."""
    m, s, o = x.model, x.s, x.options
    _require_expressible(x)
    result = [
        Group("Model", f"{m.family}, {m.parameter_count:,} parameters.", (*_model(x), *_pattern(x))),
        Group("Layout", reasons.layout(x), _order(x)),
        Group("Tensor parallelism", reasons.tensor(x), _tensor(x)),
        Group("Pipeline", reasons.pipeline(x), _pipeline(x)),
        Group("Context parallelism", reasons.context(x), _context(x)),
        Group("Data parallelism", reasons.data(x), _data(x)),
    ]
    if m.experts is not None:
        result.append(Group("Experts", reasons.experts(x), _experts(x)))
    batch = settings(
        (KEYS["strategy.micro_batch"], s.micro_batch),
        (KEYS["job.global_batch"], x.job.global_batch),
        (KEYS["job.seq"], x.job.seq),
        ("--sft", o.document > 0),
        (KEYS["options.mtp"], o.mtp or None),
    )
    result += [
        Group("Batch", reasons.batch(x), (*batch, *_dynamic(x))),
        Group("Recomputation", reasons.recomputation(x), _recompute(x)),
        Group("Number types", reasons.precision(x), _types(x)),
        Group(
            "Optimizer",
            "As the plan's job has it; learning rate and steps are blanks where it has none.",
            _optimizer(x),
        ),
        Group("Data and checkpoints", "Blanks above.", _run(x)),
    ]
    if graphs := _graphs(x):
        result.append(Group("CUDA graphs", "They launch what they capture at once.", graphs))
    return tuple(result)


def _model(x: Subject) -> tuple[Setting, ...]:
    """Return the arguments of the model. The vocabulary is given with its exact rows, or is to be padded by Megatron
    (options.vocab_multiple)."""
    every, exact = x.options.vocab_multiple, KEYS["model.vocab"]
    as_it_is = model_settings(x.model)
    if not every:
        return as_it_is
    others = (s for s in as_it_is if s.key != exact)
    return (*others, *settings(("--vocab-size", x.model.vocab), (KEYS["options.vocab_multiple"], every)))


def _dynamic(x: Subject) -> tuple[Setting, ...]:
    """Return the arguments of context parallelism whose width depends on each document (arguments.py:1404-1409)."""
    if x.job.documents != "dynamic":
        return ()
    return settings(
        ("--hybrid-context-parallel", True),
        ("--max-seqlen-per-dp-cp-rank", math.ceil(x.job.seq / x.s.cp)),
        ("--calculate-per-token-loss", True),
        ("--dataloader-type", "single"),
    )


def _pattern(x: Subject) -> tuple[Setting, ...]:
    """Return the argument of a hybrid model's pattern, which gives the chunks of its pipeline too."""
    b = write_blocks.blocks_of(x.model)
    if not b.symbols:
        return ()
    if x.options.embedding_as_layer or x.options.loss_as_layer:  # arguments.py:825-836
        field = "options.embedding_as_layer" if x.options.embedding_as_layer else "options.loss_as_layer"
        reason = "does not go with a hybrid pattern, which says where chunks end (Megatron-LM)"
        raise InputError(field, 1, reason, "leave it out")
    attention = next((symbol for symbol in b.symbols if symbol in "*+D"), "*")
    depth = attention + ("E" if "E" in b.symbols else "-")
    chunks = b.chunks(x.blocks) if x.s.pp > 1 and x.blocks else ()
    if x.s.virtual > 1 and not chunks:  # models/hybrid/hybrid_layer_allocation.py:391-402
        raise InputError(
            "strategy.virtual", x.s.virtual, "needs chunks that the pattern states", "list strategy.layers"
        )
    return settings((KEYS["model.pattern"], patterns.to_text(b.symbols, chunks, depth, x.options.mtp)))


def _order(x: Subject) -> tuple[Setting, ...]:
    return settings(("--use-tp-pp-dp-mapping", x.s.order == "dp/pp/cp/tp"))


def _tensor(x: Subject) -> tuple[Setting, ...]:
    s = x.s
    return settings(
        (KEYS["strategy.tp"], s.tp),
        (KEYS["strategy.sp"], s.sp),
        ("--tp-comm-overlap", _overlaps_products(x)),
    )


def _overlaps_products(x: Subject) -> bool:
    """Whether userbuffers overlap products with the collectives of sequence parallelism: by the options, or because
    the price of the plan assumes it."""
    assumed = x.s.sp and x.s.tp > 1 and x.options.tp_overlap == "auto" and x.stack.name != "megatron-fsdp"
    return assumed or x.options.tp_overlap == "userbuffers"


def _pipeline(x: Subject) -> tuple[Setting, ...]:
    s, o = x.s, x.options
    listed, hybrid = s.layers != "auto", bool(write_blocks.blocks_of(x.model).symbols)
    chunks = s.virtual if s.virtual > 1 and not listed and not hybrid else None
    return settings(
        (KEYS["strategy.pp"], s.pp),
        ("--num-virtual-stages-per-pipeline-rank", chunks),
        ("--pipeline-model-parallel-layout", layout.to_text(x.blocks, o.mtp) if listed and not hybrid else None),
        (KEYS["options.first_stage_layers"], o.first_stage_layers or None),
        (KEYS["options.last_stage_layers"], o.last_stage_layers or None),
        (KEYS["options.embedding_as_layer"], o.embedding_as_layer),
        (KEYS["options.loss_as_layer"], o.loss_as_layer),
        (KEYS["options.activation_offload"], o.activation_offload or None),
    )


def _is_14(x: Subject) -> bool:
    return x.stack.name == "megatron-core-0.14"


def _require_expressible(x: Subject) -> None:
    """Require combinations of options that validate_args and TransformerConfig accept. Raises InputError."""
    s, o, layers = x.s, x.options, x.model.layers
    ends = [n for n in (o.first_stage_layers, o.last_stage_layers) if n]
    if ends:
        field = "options.first_stage_layers" if o.first_stage_layers else "options.last_stage_layers"
        if o.embedding_as_layer or o.loss_as_layer:
            reason = "does not go with an embedding or a loss that counts as a block"
            raise InputError(field, ends[0], f"{reason} (Megatron-Core)", "leave one of them out")
        middle, stages = layers - sum(ends), (s.pp - len(ends)) * s.virtual
        if (stages == 0) != (middle == 0) or (stages and middle % stages) or any(n % s.virtual for n in ends):
            reason = (
                f"leaves {middle} blocks, which do not divide over {s.pp - len(ends)} stages of {s.virtual} chunks"
            )
            raise InputError(field, ends[0], reason, "use strategy.layers to list the blocks of each chunk")
    elif o.embedding_as_layer or o.loss_as_layer:
        counted = layers + o.embedding_as_layer + o.loss_as_layer
        if counted % (s.pp * s.virtual):
            field = "embedding_as_layer" if o.embedding_as_layer else "loss_as_layer"
            reason = f"makes {counted} blocks, which do not divide over {s.pp * s.virtual} chunks"
            raise InputError(f"options.{field}", True, reason, "use strategy.layers to list the blocks of each chunk")
    if _is_14(x) and x.model.window is not None:
        reason = "is not an argument of Megatron-Core 0.14 (its configuration alone has window_size)"
        raise InputError("model.window", x.model.window, reason, "use Megatron-Core 0.19")
    narrow = o.narrow_parameters == "on"
    if narrow and o.products == "auto":
        reason = "needs products in 8 or 4 bits"
        raise InputError("options.narrow_parameters", "on", reason, "add e.g. products=float8")
    if narrow and o.optimizer_offload and o.products != "float8-delayed":
        reason = f"goes with an offloaded optimizer only under float8-delayed, not {o.products} (Megatron-Core)"
        raise InputError("options.narrow_parameters", "on", reason, "leave one of them out")
    if o.mtp and x.model.position == "learned":
        reason = "multi-token prediction needs rotary positions (Megatron-Core)"
        raise InputError("options.mtp", o.mtp, reason, "leave it out")


def _context(x: Subject) -> tuple[Setting, ...]:
    s = x.s
    if s.cp == 1:
        return settings((KEYS["strategy.cp"], 1))
    ring = "all_gather" if x.options.context == "all_gather" else "p2p"
    kind = ring if s.ulysses == 1 else "a2a" if s.ring == 1 else "a2a+p2p"
    return settings(
        (KEYS["strategy.cp"], s.cp),
        ("--cp-comm-type", kind),
        ("--hierarchical-context-parallel-sizes", (s.ulysses, s.ring) if kind == "a2a+p2p" else None),
    )


def _data(x: Subject) -> tuple[Setting, ...]:
    s = x.s
    fsdp = x.stack.name == "megatron-fsdp"
    several, overlapped = s.dp * s.cp > 1, x.options.dp_overlap
    bucket = None if s.bucket == "auto" else math.ceil(s.bucket * 2**20 / _gradient_bytes(x))
    return settings(
        ("--use-megatron-fsdp", fsdp),
        KEYS.setting("strategy.zero", s.zero) if fsdp else ("", None),
        ("--ckpt-format", "fsdp_dtensor" if fsdp else None),
        ("--init-model-with-meta-device", fsdp and s.level.state),
        ("--no-gradient-accumulation-fusion", fsdp and s.level.gradients),
        ("--use-distributed-optimizer", s.level.state or fsdp or _needs_distributed(x)),
        ("--num-distributed-optimizer-instances", s.dp_replicate if s.level.state and s.dp_replicate > 1 else None),
        # what the price assumes: gradients are reduced while the last backward pass goes on
        ("--overlap-grad-reduce", overlapped != "none" and several and not (fsdp and not s.level.state)),
        ("--overlap-param-gather", overlapped == "auto" and several and s.level.state),
        ("--ddp-bucket-size", bucket),
    )


def _gradient_bytes(x: Subject) -> int:
    return 2 if x.options.gradients == "bfloat16" or x.options.reduce == "bfloat16" else 4


def _experts(x: Subject) -> tuple[Setting, ...]:
    s, o = x.s, x.options
    flex = o.dispatch in ("deepep", "hybridep")
    words = {"all_gather": "allgather", "all_to_all": "alltoall", "auto": "alltoall"}
    return settings(
        (KEYS["strategy.ep"], s.ep),
        (KEYS["strategy.etp"], s.etp),
        ("--moe-token-dispatcher-type", "flex" if flex else words[o.dispatch]),
        ("--moe-enable-deepep", flex and _is_14(x)),
        ("--moe-flex-dispatcher-backend", o.dispatch if flex and not _is_14(x) else None),
        ("--overlap-moe-expert-parallel-comm", o.overlap_experts == "on"),
        ("--moe-router-force-load-balancing", o.routing == "balanced"),
        ("--moe-permute-fusion", True),
    )


def _graphs(x: Subject) -> tuple[Setting, ...]:
    how = x.options.graphs
    if not _is_14(x):
        words = {"none": "none", "modules": "transformer_engine", "full": "full_iteration"}
        return settings(("--cuda-graph-impl", words.get(how)))
    return settings(
        ("--external-cuda-graph", how == "modules"),
        ("--enable-cuda-graph", how == "full"),
        ("--cuda-graph-scope", "full_iteration" if how == "full" else None),
    )


def _recompute(x: Subject) -> tuple[Setting, ...]:
    how = recomputation.parse(x.s.recompute)
    if how.kind == "none":
        return ()
    if how.kind == "selective":
        modules = how.modules if how.modules != ("core_attn",) else None
        return settings(("--recompute-granularity", "selective"), ("--recompute-modules", modules))
    method = "block" if how.kind == "block" else "uniform"
    return settings(
        ("--recompute-granularity", "full"), ("--recompute-method", method), ("--recompute-num-layers", how.count)
    )


def _types(x: Subject) -> tuple[Setting, ...]:
    o = x.options
    eight, four = o.products in KEYS.values("options.products"), o.products == "nvfp4"
    state = (o.first_moment, o.second_moment, o.master)
    narrow = any(kind not in ("auto", "float32") for kind in state)
    offloaded = o.optimizer_offload > 0
    wide = o.gradients != "bfloat16" and o.reduce != "bfloat16" and x.compute != "fp32"

    def stated(name: str) -> tuple[str, Any]:
        value = getattr(o, name)
        return ("", None) if value == "auto" else KEYS.setting(f"options.{name}", value)

    return settings(
        ("--bf16", x.compute == "bf16"),
        ("--fp16", x.compute == "fp16"),
        ("--fp8-format", "hybrid" if eight else None),
        KEYS.setting("options.products", o.products) if eight else ("", None),
        ("--fp4-format", "e2m1" if four else None),
        ("--fp8-param-gather", eight and o.narrow_parameters == "on"),
        ("--fp4-param-gather", four and o.narrow_parameters == "on"),
        ("--accumulate-allreduce-grads-in-fp32", wide),
        ("--grad-reduce-in-bf16", o.reduce == "bfloat16"),
        ("--use-precision-aware-optimizer", narrow or offloaded or o.gradients == "bfloat16"),
        *map(stated, ("first_moment", "second_moment", "master", "gradients")),
        ("--optimizer-cpu-offload", offloaded),
        (KEYS["options.optimizer_offload"], o.optimizer_offload if offloaded else None),
        KEYS.setting("options.attention", o.attention) if o.attention != "auto" else ("--attention-backend", None),
        ("--cross-entropy-loss-fusion", o.cross_entropy in _FUSIONS),
        KEYS.setting("options.cross_entropy", o.cross_entropy) if o.cross_entropy in _FUSIONS else ("", None),
    )


def _needs_distributed(x: Subject) -> bool:
    """Return whether an option needs the distributed optimizer, even on one rank, where it shards nothing."""
    o = x.options
    state = {o.first_moment, o.second_moment, o.master} - {"auto", "float32"}
    return bool(state or o.gradients == "bfloat16" or o.optimizer_offload or o.narrow_parameters == "on")


def _optimizer(x: Subject) -> tuple[Setting, ...]:
    a = x.optimizer
    adam, muon = "eps" in a.row.reads, a.row.whole
    return settings(
        ("--optimizer", optimizer_word(KEYS, a.name, x.stack.title)),
        (KEYS["job.optimizer.betas.0"], a.betas[0] if adam else None),
        (KEYS["job.optimizer.betas.1"], a.betas[1] if adam else None),
        (KEYS["job.optimizer.eps"], a.eps if adam else None),
        ("--sgd-momentum", None if adam else a.first_decay),
        ("--muon-momentum", a.first_decay if muon else None),
        ("--muon-nesterov", muon),
        ("--muon-scale-mode", "spectral" if muon else None),  # sqrt(max(rows, columns)), times what follows
        ("--muon-extra-scale-factor", MUON_RMS if muon else None),
        ("--muon-tp-mode", "distributed" if muon and x.s.tp > 1 else None),  # by itself each tp rank's part alone
        (KEYS["job.optimizer.weight_decay"], a.weight_decay),
        (KEYS["job.clip"], x.job.clip),
        ("--lr", "$LR"),
        ("--min-lr", "$MIN_LR"),
        ("--lr-decay-style", x.schedule_in({"inverse-sqrt": "inverse-square-root"} | SAME_NAME, "cosine")),
        ("--lr-warmup-iters", x.training.warmup),
        ("--train-iters", "$TRAIN_ITERS"),
    )


SAME_NAME = {name: name for name in ("cosine", "linear", "constant")}
"""Schedules of a learning rate that Megatron names as a StatedTraining does."""


def _run(x: Subject) -> tuple[Setting, ...]:
    return settings(
        ("--distributed-backend", "nccl"),
        ("--tokenizer-type", "HuggingFaceTokenizer"),
        ("--tokenizer-model", "$TOKENIZER"),
        ("--data-path", "$DATA_PATH"),
        ("--split", "99,1,0"),
        ("--save", "$CHECKPOINTS"),
        ("--load", "$CHECKPOINTS"),
        ("--save-interval", x.training.save_every or 1000),
        ("--seed", x.training.seed or None),
        ("--eval-interval", 1000),
        ("--eval-iters", 10),
        ("--log-interval", 1),
        ("--log-throughput", True),
    )


def blanks(x: Subject) -> tuple[Blank, ...]:
    """Return the blanks of train.sh."""
    data = "the common name of the .bin and .idx that tools/preprocess_data.py made"
    return (Blank("MEGATRON", "The folder of Megatron-LM."), *common.blanks(x, data, final=True))


def variables(x: Subject) -> tuple[Variable, ...]:
    """Return the environment variables that the layout needs."""
    result = []
    old = not any(name in x.cluster.device.name for name in ("B200", "B300", "GB200", "GB300", "Rubin"))
    if (x.s.tp > 1 or x.s.cp > 1) and old and x.stack.name != "megatron-fsdp":
        why = (
            "One hardware queue, so that a collective of tensor or context parallelism starts before the product "
            "that hides it (GPUs before Blackwell; Megatron-LM stops without it)."
        )
        result.append(Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", why))
    if x.stack.name == "megatron-fsdp":
        why = "Several hardware queues: FSDP's gathers overlap products (Megatron-LM stops where it is 1)."
        result.append(Variable("CUDA_DEVICE_MAX_CONNECTIONS", "8", why))
    if x.options.document:
        why = "Mean tokens of a document, which the price assumes and no argument states; phalanx read takes it."
        result.append(Variable("PHALANX_ASSUMES", f"document={x.options.document}", why))
    why = "Segments that grow, so that unequal micro-batches and the optimizer's buffers do not fragment memory."
    result.append(Variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", why))
    return tuple(result)
