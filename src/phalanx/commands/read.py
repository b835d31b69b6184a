"""What `phalanx read` does: a framework's configuration as a strategy, a job and a plan; and the question it asks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.formats.read import files
from phalanx.formats.read.configuration import Config, Configuration, Layout, count, shown
from phalanx.formats.read.lints import Mistake, lint
from phalanx.plan import question as names
from phalanx.plan.explain.lint import Finding
from phalanx.spec.errors import InputError
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

_DEFAULT_ZERO = {"torchtitan": 3, "maxtext": 3, "nemo": 1, "hf": 0, "megatron": 0, "deepspeed": 0, "accelerate": 0}
"""ZeRO where a file leaves it open: what its framework does by itself."""
_RECOMPUTED = {"none", "selective", "full"}
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


@dataclass(frozen=True)
class Reading:
    """A configuration that was read, with its mistakes and what was assumed where it leaves something open."""

    configuration: Configuration
    mistakes: tuple[Mistake, ...]
    notes: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        """What the file fixes."""
        return self.configuration.layout

    def as_json(self) -> dict[str, Any]:
        """Return the JSON of `phalanx read`; null: left open by the file."""
        c, s = self.configuration, self.layout
        fields = asdict(s)
        job = {name: fields.pop(name) for name in ("global_batch", "seq", "precision")}
        return {
            "kind": c.kind,
            "stack": c.stack,
            "world": fields.pop("world"),
            "strategy": fields,
            "job": job,
            "model": c.sizes or c.model_name or None,
            "understood": {shown(key): meaning for key, meaning in c.understood.items()},
            "without_effect": [shown(key) for key in c.without_effect],
            "not_modelled": [shown(key) for key in c.not_modelled],
            "unknown": {shown(key): near for key, near in c.unknown.items()},
            "lints": [asdict(m) for m in self.mistakes],
            "notes": list(self.notes),
        }


def read(paths: Sequence[Path], kind: str | None = None, gpus: int | None = None) -> Reading:
    """Read a configuration; `gpus`: its ranks, where it leaves them open. Raises InputError."""
    if gpus is not None:
        names.require_counts(("--gpus", gpus))
    found, config = files.read(paths, kind, gpus)
    stated = found.layout.world
    if gpus is not None and stated is not None and stated != gpus:
        found = files.READERS[found.kind](config, gpus)
    return Reading(found, tuple(lint(config, found)), _notes(found, config))


def _notes(c: Configuration, config: Config) -> tuple[str, ...]:
    s = c.layout
    notes = []
    if s.zero is None and c.kind in _DEFAULT_ZERO:
        notes.append(f"zero is left open: {_DEFAULT_ZERO[c.kind]} is what {c.stack} does by itself")
    if s.world is None:
        notes.append("the number of ranks is left open: --gpus says it")
    if s.recompute not in (None, *_RECOMPUTED):
        notes.append(f"recompute={s.recompute} is the framework's own: it is priced as full")
    return tuple(notes)


def strategy_of(c: Configuration, gpus: int) -> Strategy:
    """Return the Strategy of a configuration on so many ranks. Raises InputError naming what is left open, or what no
    Strategy can say."""
    s = c.layout
    tp, pp, cp = s.tp or 1, s.pp or 1, s.cp or 1
    if gpus % (tp * pp * cp):
        reason = f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} ranks"
        raise InputError("--gpus", gpus, reason, f"use a multiple of {tp * pp * cp}")
    dp = gpus // (tp * pp * cp)
    zero = s.zero if s.zero is not None else _DEFAULT_ZERO.get(c.kind, 0)
    shard = s.shard if s.shard and zero and dp % s.shard == 0 and s.shard < dp else None
    recompute = s.recomputed or (s.recompute if s.recompute in _RECOMPUTED else "full" if s.recompute else "none")
    virtual = s.virtual or 1
    fields: dict[str, Any] = {
        "dp": dp,
        "zero": zero if dp * cp > 1 else 0,
        "shard": shard,
        "tp": tp,
        "sp": bool(s.sp) and tp > 1,
        "cp": cp,
        "ulysses": s.ulysses or 1,
        "layers": s.layers or "auto",
        "ep": s.ep or 1,
        "etp": s.etp or 1,
        "pp": pp,
        "virtual": virtual if pp > 1 else 1,
        "micro_batch": s.micro_batch or 1,
        "recompute": recompute,
    }
    if pp > 1:
        fields["schedule"] = "interleaved" if virtual > 1 else s.schedule or "1f1b"
    return Strategy(**fields)


def model_of(c: Configuration, named: str | None) -> tuple[ModelSpec, list[str]]:
    """Return the model of a configuration, by --model or by the sizes that it states. Raises InputError."""
    if named is not None:
        return names.model_named(named)
    sizes = c.sizes
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if count(sizes.get(name)) is None]
    if missing:
        reason = f"the file leaves {', '.join(missing)} open"
        raise InputError("--model", None, reason, "name a preset or a config.json")
    if experts := sizes.get("num_experts"):
        reason = f"the file has {experts} experts, and sizes alone do not make a mixture of experts"
        raise InputError("--model", None, reason, "name a preset or a config.json")
    sizes = {"model_type": "llama", "intermediate_size": 4 * int(sizes["hidden_size"]), **sizes}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(sizes))
        model, notes = names.model_named(str(path))
    return model, [*notes, "the model is of the sizes that the file states, as a Llama"]


def findings_in(path: Path, gpus: int | None) -> list[Finding]:
    """Return the mistakes of a configuration as findings of `lint`; none of any other file. Raises InputError."""
    if not is_configuration(path):
        return []
    return [
        Finding(m.name, f"{m.key} {m.problem}", f"{m.mend} ({m.source})") for m in read([path], None, gpus).mistakes
    ]


def is_configuration(path: Path) -> bool:
    """Whether a file is another framework's configuration, not a plan, a run's folder or an observation."""
    if path.is_dir() or not path.is_file() or path.suffix == ".py":
        return False
    try:
        config = files.document(path)
    except InputError:
        return False
    if "version" in config and ("strategy" in config or "ranks" in config):
        return False
    if path.suffix.lower() == ".toml" and files.kind_of(config) != "torchtitan":  # a job file of ours
        return False
    return files.kind_of(config) is not None


def asked_by(path: Path, asked: Any) -> Any:
    """Return the question that a configuration asks: an `Asked` with the file's model, batch, sequence length,
    strategy, stack and precision, where its options do not say otherwise. Raises InputError."""
    reading = read([path], None, asked.gpus)
    c, s = reading.configuration, reading.layout
    gpus = asked.gpus or s.world
    if gpus is None:
        raise InputError("--gpus", None, f"is missing: {path} leaves the number of ranks open", "say how many")
    strategy = strategy_of(c, gpus)
    if asked.batch is None and c.kind == "megatron" and s.global_batch is None:
        raise InputError(
            "--batch", None, f"is missing: {path} leaves the global batch open", "say how many sequences"
        )
    batch = asked.batch or s.global_batch or (s.micro_batch or 1) * (s.accumulation or 1) * strategy.dp
    if asked.seq is None and s.seq is None:
        raise InputError("--seq", None, f"is missing: {path} leaves the sequence length open", "say how long")
    model = asked.model if asked.model is not None else model_of(c, None)[0]
    return replace(
        asked,
        source=None,
        model=model,
        gpus=gpus,
        batch=batch,
        seq=asked.seq or s.seq,
        strategy=asked.strategy or str(strategy),
        stack=asked.stack or c.stack,
        precision=asked.precision or _PRECISIONS.get(s.precision or ""),
    )
