"""A plan as nanotron's YAML."""

from typing import Any

from phalanx.frameworks.keys import key_table, optimizer_word
from phalanx.frameworks.writing import reasons
from phalanx.frameworks.writing.blanks import blanks
from phalanx.frameworks.writing.program import Blank, Group, TrainingProgram, Variable, group
from phalanx.frameworks.writing.script import TORCHRUN
from phalanx.frameworks.writing.subject import Subject, require_plain
from phalanx.frameworks.writing.yaml import Unquoted, document
from phalanx.spec.errors import InputError
from phalanx.spec.model.spec import ModelSpec

KEYS = key_table("nanotron")
_MODELS = {"llama": "is_llama_config", "mistral": "is_llama_config", "qwen2": "is_qwen2_config"}


def program(x: Subject) -> TrainingProgram:
    """Return a plan as config.yaml. Raises InputError for what nanotron has no key or no model for."""
    require_plain(x.model, x.stack.title)
    _require_model(x.model)
    if x.compute == "fp16":
        raise InputError("job.precision.compute", "float16", "nanotron has no loss scale", "use bfloat16")
    data = "a folder of tokens that tools/preprocess_data.py made"
    variables: tuple[Variable, ...] = ()
    if x.s.tp > 1:
        why = "One hardware queue, so that collectives start before the products that hide them."
        variables = (Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", why),)
    parts = groups(x)
    start = (
        "# nanotron reads a file, so the blanks go into a copy of it.\n"
        "for name in DATA_PATH TOKENIZER CHECKPOINTS LR MIN_LR TRAIN_ITERS; do\n"
        '  words+=(-e "s|FILL-IN-$name|${!name}|")\n'
        "done\n"
        'sed "${words[@]}" config.yaml > "${TMPDIR:-/tmp}/nanotron-config.yaml"\n'
        f'exec {TORCHRUN} \\\n  "$NANOTRON/run_train.py" --config-file "${{TMPDIR:-/tmp}}/nanotron-config.yaml"'
    )
    head = f"{x.stack.title}: run_train.py --config-file. train.sh fills in the blanks."
    return TrainingProgram(
        x.stack.title,
        parts,
        start,
        variables,
        (Blank("NANOTRON", "The folder of nanotron."), *blanks(x, data, final=True)),
        {"config.yaml": document(parts, head)},
    )


def _require_model(m: ModelSpec) -> None:
    if m.family not in _MODELS:
        raise InputError("model.family", m.family, "has no model in nanotron's trainer", f"use {', '.join(_MODELS)}")
    for field, ok in (
        ("window", m.window is None or m.window >= m.max_seq),
        ("rope_scaling", m.rope_scaling is None),
        ("head_dim", m.head_dim * m.heads == m.hidden),
        ("qkv_bias", m.qkv_bias == (m.family == "qwen2")),
        ("out_bias", not m.out_bias),
        ("mlp_bias", not m.mlp_bias),
    ):
        if not ok:
            raise InputError(f"model.{field}", None, f"nanotron's {m.family} has no key for it", "use another model")


def groups(x: Subject) -> tuple[Group, ...]:
    """Return all keys, section by section."""
    s, m = x.s, x.model
    return (
        group(
            "Run",
            "",
            {"general": {"project": "phalanx", "run": f"{m.family}-{s.world}", "seed": x.training.seed or 0}},
        ),
        group(
            "Layout",
            f"{reasons.layout(x)} {reasons.tensor(x)} {reasons.pipeline(x)} {reasons.recomputation(x)}",
            _parallelism(x),
        ),
        group("Batch", reasons.batch(x), _tokens(x)),
        group("Optimizer", reasons.data(x), _optimizer(x)),
        group("Model", f"{m.family}, {m.parameter_count:,} parameters. {reasons.precision(x)}", _model(x)),
        group(
            "Data and checkpoints",
            "Blanks of train.sh.",
            {
                "tokenizer": {"tokenizer_name_or_path": "FILL-IN-TOKENIZER"},
                "checkpoints": {
                    "checkpoints_path": "FILL-IN-CHECKPOINTS",
                    "checkpoint_interval": x.training.save_every or 1000,
                    "checkpoints_path_is_shared_file_system": True,
                },
                "data_stages": [
                    {
                        "name": "Training",
                        "start_training_step": 1,
                        "data": {
                            "seed": x.training.seed or 0,
                            "num_loading_workers": 1,
                            "dataset": {
                                "dataset_folder": "FILL-IN-DATA_PATH",
                                "tokenizer_name": "FILL-IN-TOKENIZER",
                                "vocab_size": m.vocab,
                                "token_size_in_bytes": 4 if m.vocab > 2**16 else 2,
                            },
                        },
                    }
                ],
            },
        ),
    )


def _parallelism(x: Subject) -> dict[str, Any]:
    s = x.s
    return KEYS.write(
        {
            "strategy.dp": s.dp,
            "strategy.pp": s.pp,
            "strategy.schedule": s.schedule,
            "strategy.tp": s.tp,
            "strategy.sp": s.sp,
            "options.tp_overlap": "async" if x.options.tp_overlap == "async" else "none",
            "strategy.cp": s.cp,
            "strategy.recompute": s.recompute,
        }
    )


def _tokens(x: Subject) -> dict[str, Any]:
    batch = {"job.seq": x.job.seq, "strategy.micro_batch": x.s.micro_batch, "accumulation": x.micro_batches}
    return KEYS.write(batch) | {
        "tokens.train_steps": Unquoted("FILL-IN-TRAIN_ITERS"),
        "tokens.val_check_interval": -1,
    }


def _optimizer(x: Subject) -> dict[str, Any]:
    a = x.job.optimizer
    state = {
        "strategy.zero": x.s.zero,
        "options.gradients": "bfloat16" if x.options.gradients == "bfloat16" else "float32",
        "job.clip": x.job.clip or None,
        "job.optimizer.weight_decay": a.weight_decay,
    }
    adam = {"job.optimizer.betas.0": a.betas[0], "job.optimizer.betas.1": a.betas[1], "job.optimizer.eps": a.eps}
    schedule = {
        "learning_rate": Unquoted("FILL-IN-LR"),
        "lr_warmup_steps": x.training.warmup or 0,
        "lr_warmup_style": "linear",
        "lr_decay_style": x.schedule_in({"linear": "linear"}, "cosine"),
        "min_decay_lr": Unquoted("FILL-IN-MIN_LR"),
    }
    return (
        KEYS.write(state)
        | {KEYS["job.optimizer.name"]: optimizer_word(KEYS, x.optimizer.name, "nanotron")}
        | KEYS.write(adam)
        | {"optimizer.optimizer_factory.torch_adam_is_fused": True}
        | {f"optimizer.learning_rate_scheduler.{name}": value for name, value in schedule.items()}
    )


def _model(x: Subject) -> dict[str, Any]:
    m = x.model
    table: dict[str, Any] = {
        **KEYS.write({"job.precision": x.compute}),
        "model.make_vocab_size_divisible_by": 1,
        "model.init_method.std": 0.02,
    }
    if x.s.bucket != "auto":
        if x.s.bucket != int(x.s.bucket):
            raise InputError("strategy.bucket", x.s.bucket, "nanotron's buckets are whole MiB", "round it")
        table |= KEYS.write({"strategy.bucket": int(x.s.bucket)})
    return (
        table
        | {key: getattr(m, name) for name, key in KEYS.fields("model").items()}
        | {f"model.model_config.{_MODELS[m.family]}": True, "model.model_config.hidden_act": "silu"}
    )
