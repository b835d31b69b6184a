"""A plan as torchtitan's configuration: a Python module whose function `plan` returns a Trainer.Config."""

from itertools import accumulate
from pprint import pformat
from textwrap import indent
from typing import Any

from phalanx.frameworks.keys import key_table, optimizer_word
from phalanx.frameworks.torchtitan.models import FLAVORS
from phalanx.frameworks.torchtitan.read import SCHEDULE_FILE
from phalanx.frameworks.writing import reasons
from phalanx.frameworks.writing.blanks import blanks
from phalanx.frameworks.writing.program import Group, TrainingProgram, Variable, group
from phalanx.frameworks.writing.script import TEMPLATES, TORCHRUN, comment, filled
from phalanx.frameworks.writing.subject import Subject
from phalanx.schedule.pipeline.schedules import build
from phalanx.schedule.pipeline.torch_csv import to_csv
from phalanx.spec.errors import InputError

KEYS = key_table("torchtitan")
_CSV = "pipeline_schedule.csv"
_CONVERTERS = {
    "float8-block": ("Float8LinearConverter", 'recipe_name="rowwise", '),
    "mxfp8": ("MXFP8LinearConverter", ""),
}


def program(x: Subject) -> TrainingProgram:
    """Return a plan as phalanx_plan.py. Raises InputError for what torchtitan has no key or no model for."""
    _require_expressible(x)
    data = "the name of a dataset that torchtitan knows, such as c4"
    why = "Segments that grow, so that unequal micro-batches do not fragment memory."
    parts = groups(x)
    return TrainingProgram(
        x.stack.title,
        parts,
        f'export PYTHONPATH="$PWD:${{PYTHONPATH:-}}"\nexec {TORCHRUN} \\\n'
        "  -m torchtitan.train --module phalanx_plan --config plan",
        (Variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", why),),
        blanks(x, data, "A folder with a Hugging Face tokenizer"),
        {"phalanx_plan.py": _module(x, parts)} | ({_CSV: _actions(x)} if x.s.schedule.endswith(".csv") else {}),
    )


def _require_expressible(x: Subject) -> None:
    m, o, s = x.model, x.options, x.s
    shape = (m.family, m.layers, m.hidden, m.vocab)
    if shape not in FLAVORS:
        known = ", ".join(f"{module} {flavor}" for module, flavor in FLAVORS.values())
        remedy = f"it has {known}; accelerate trains any model of transformers"
        raise InputError("model", f"{m.family} of {m.layers} x {m.hidden}", "is not a model of torchtitan", remedy)
    own = {"optimizer": "adam", "attention": "flex"}  # what its release does by itself
    for field in ("document", "lora", "mtp", "dispatch", "optimizer", "cross_entropy", "attention"):
        value = getattr(o, field)
        default = getattr(type(o), field)
        if value not in (default, own.get(field)):
            reason = "takes changes of torchtitan's model or loss that no configuration of its release holds"
            raise InputError(f"options.{field}", value, reason, "leave it out")
    if x.compute == "fp16":
        raise InputError("job.precision.compute", "float16", "torchtitan has no loss scale", "use bfloat16")
    if s.pp > 1 and not x.blocks:
        reason = "is exported as the blocks of each chunk"
        raise InputError("options.first_stage_layers", o.first_stage_layers, reason, "list them in strategy.layers")


def groups(x: Subject) -> tuple[Group, ...]:
    """Return all keys, group by group."""
    s = x.s
    parallel: dict[str, Any] = {
        "parallelism.data_parallel_replicate_degree": s.dp_replicate,
        "parallelism.data_parallel_shard_degree": s.dp_shard,
    }
    if s.level.gradients:
        parallel |= KEYS.write({"strategy.zero": s.zero})
    tensor = {KEYS["strategy.tp"]: s.tp}
    if s.tp > 1:
        tensor[KEYS["strategy.sp"]] = s.sp
    result = [
        group("Data parallelism", f"{reasons.layout(x)} {reasons.data(x)}", parallel),
        group("Tensor parallelism", reasons.tensor(x), tensor),
        group("Context parallelism", reasons.context(x), {KEYS["strategy.cp"]: s.cp}),
    ]
    if s.pp > 1:
        result.append(group("Pipeline", reasons.pipeline(x), _pipeline(x)))
    if x.model.experts is not None:
        result.append(group("Experts", reasons.experts(x), {KEYS["strategy.ep"]: s.ep}))
    result.append(group("Batch", f"{reasons.batch(x)} {reasons.precision(x)}", _training(x)))
    if x.options.tp_overlap == "async":
        why = "Products are cut by the compiler, so that each part overlaps the exchange of the next."
        overlap = {"compile.enable": True, KEYS["options.tp_overlap"]: True}
        result.append(group("Overlap of tensor parallelism", why, overlap))
    return tuple(result)


def _pipeline(x: Subject) -> dict[str, Any]:
    s = x.s
    starts = (0, *accumulate(x.blocks))
    parts = [[f"layers.{i}" for i in range(a, a + n)] for a, n in zip(starts, x.blocks, strict=False)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    own = s.schedule.endswith(".csv")
    return {
        **KEYS.write({"strategy.pp": s.pp}),
        **({SCHEDULE_FILE[0]: _CSV} if own else KEYS.write({"strategy.schedule": s.schedule})),
        "parallelism.pipeline_parallel_microbatch_size": s.micro_batch,
        KEYS["strategy.layers"]: parts,
    }


def _actions(x: Subject) -> str:
    """Return the schedule's actions as torch's CSV, without sends and receives, which torch inserts."""
    return to_csv(build(x.s.schedule, x.s.pp, x.micro_batches, x.s.virtual if x.s.virtual > 1 else None))


def _training(x: Subject) -> dict[str, Any]:
    s = x.s
    # a pipeline takes all micro-batches of a step at once
    local = s.micro_batch * x.micro_batches if s.pp > 1 else s.micro_batch
    return {
        KEYS["strategy.micro_batch"]: local,
        KEYS["job.global_batch"]: x.job.global_batch,
        KEYS["job.seq"]: x.job.seq,
        KEYS["job.clip"]: x.job.clip,
        **KEYS.write({"job.precision": x.compute}),
        KEYS["options.parameter_offload"]: x.options.parameter_offload,
        # torchtitan refuses CUDA graphs with pipelines, and with experts whose dispatch waits for the host
        "training.disable_cuda_graphs": s.pp > 1 or x.model.experts is not None or x.options.parameter_offload,
    }


_SECTIONS = {"parallelism": "ParallelismConfig", "training": "TrainingConfig", "compile": "CompileConfig"}


def _literal(value: Any) -> str:
    """Return a value as a literal of Python; a list of lists on several lines."""
    if not (isinstance(value, list) and value and isinstance(value[0], list)):
        return repr(value)
    return "[\n" + "".join(indent(f"{pformat(v, width=84, compact=True)},\n", " " * 4) for v in value) + "]"


def _module(x: Subject, parts: tuple[Group, ...]) -> str:
    """Return the text of the module. `parts`: its settings."""
    m, a = x.model, x.job.optimizer
    module, flavor = FLAVORS[m.family, m.layers, m.hidden, m.vocab]
    arguments: dict[str, list[str]] = {name: [] for name in _SECTIONS}
    for g in parts:
        section = g.settings[0].key.split(".")[0]
        arguments[section].append(comment(f"{g.title}. {g.why}", " " * 12))
        for setting in g.settings:
            arguments[section].append(indent(f"{setting.key.split('.')[1]}={_literal(setting.value)},\n", " " * 12))
    arguments["training"].append('            steps=int(os.environ["TRAIN_ITERS"]),\n')
    sections = "".join(
        f"        {name}={_SECTIONS[name]}(\n{''.join(lines)}        ),\n"
        for name, lines in arguments.items()
        if lines
    )
    converter = _CONVERTERS.get(x.options.products)
    imported, converted = "", ""
    if converter:
        name, first = converter
        imported = f"from torchtitan.components.quantization import {name}\n"
        converted = f", converters=[{name}.Config({first}model_compile_enabled=True)]"
        if "compile" not in [g.settings[0].key.split(".")[0] for g in parts]:
            sections += "        compile=CompileConfig(enable=True),\n"
    word = optimizer_word(KEYS, a.name, "torchtitan")
    recompute = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}[x.s.recompute]
    return filled(
        TEMPLATES / "phalanx_plan.py.template",
        title=x.stack.title,
        word=word,
        imported=imported,
        module=module,
        flavor=repr(flavor),
        converted=converted,
        betas=tuple(a.betas),
        eps=repr(a.eps),
        weight_decay=repr(a.weight_decay),
        decay=repr(x.schedule_in({"linear": "linear", "constant": "linear"}, "cosine")),
        final_lr_share=repr(x.final_lr_share),
        save_every=x.training.save_every or 1000,
        debug=f"        debug=DebugConfig(seed={x.training.seed}),\n" if x.training.seed else "",
        debug_part="DebugConfig, " if x.training.seed else "",
        warmup=x.training.warmup or 0,
        why=comment(f"Recomputation. {reasons.recomputation(x)}", " " * 8),
        recompute=recompute,
        sections=sections,
    )
