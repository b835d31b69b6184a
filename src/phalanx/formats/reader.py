"""Read the configuration of any framework: recognise its kind from its content, then let its reader explain it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.formats.configuration.reading import Configuration, Reading
from phalanx.formats.configuration.shell import Script, launched
from phalanx.formats.deepspeed import read as deepspeed
from phalanx.formats.megatron import read as megatron
from phalanx.spec.documents import read_json, read_text
from phalanx.spec.errors import InputError, nearest

READERS: dict[str, Callable[[Configuration], Reading]] = {"megatron": megatron.read, "deepspeed": deepspeed.read}


def read(path: Path, gpus: int | None = None, kind: str | None = None) -> Reading:
    """Read a configuration file. Raises InputError for one that is not understood."""
    c = load(path, gpus, kind)
    return READERS[c.kind](c)


def load(path: Path, gpus: int | None = None, kind: str | None = None) -> Configuration:
    """Load a file as settings and recognise its kind. Raises InputError."""
    if kind is not None and kind not in READERS:
        raise InputError("--kind", kind, "is not a kind that Phalanx reads", nearest(kind, READERS))
    if path.suffix == ".json":
        settings = read_json(path, "FILE")
        if not isinstance(settings, Mapping):
            raise InputError("FILE", str(path), "is not a table of settings")
        if (kind in (None, "deepspeed") and is_deepspeed(settings)) or kind == "deepspeed":
            return Configuration("deepspeed", settings, world=gpus, where=str(path))
        raise InputError("FILE", str(path), "is no configuration that Phalanx knows", "name its --kind")
    text = read_text(path, "FILE", 2**22)
    script = Script(text)
    launch, settings, _ = launched(script)
    if not settings:
        raise InputError("FILE", str(path), "has no command with flags", "is it the right file?")
    known, unmodelled = megatron.arguments()
    named = sum(name.replace("-", "_") in known | unmodelled for name in settings)
    if kind is None and 2 * named < len(settings):
        reason = f"{named} of its {len(settings)} flags are Megatron-LM's"
        raise InputError("FILE", str(path), reason, "name its --kind")
    return Configuration("megatron", settings, script.exported, launch, gpus or _world(launch), str(path))


def is_deepspeed(settings: Mapping[str, Any]) -> bool:
    """Whether a table has keys that only DeepSpeed's configurations have."""
    return any(name in settings for name in deepspeed.TOP[:3]) or "zero_optimization" in settings


def _world(launch: Mapping[str, Any]) -> int | None:
    """Nodes x processes of each, as torchrun has them; None if either is open."""
    each = launch.get("nproc_per_node", launch.get("nproc-per-node"))
    nodes = launch.get("nnodes", 1)
    return each * nodes if type(each) is int and type(nodes) is int else None


def as_json(r: Reading) -> dict[str, Any]:
    """Return a reading as `phalanx read --json` prints it."""
    f = r.facts
    strategy = {n: getattr(f, n) for n in ("tp", "pp", "dp", "cp", "ep", "etp", "virtual", "zero", "shard", "sp")}
    strategy |= {n: getattr(f, n) for n in ("ulysses", "schedule", "layers", "order", "micro_batch", "recompute")}
    job = {n: getattr(f, n) for n in ("world", "grad_accum", "global_batch", "seq", "precision")}
    unknown = [
        {
            "key": u.key,
            "value": json.loads(json.dumps(u.value, default=str)),
            "nearest": u.nearest,
            "reason": u.reason,
        }
        for u in r.unknown
    ]
    options = {**r.options, "optimizer_offload": f.optimizer_offload, "parameter_offload": f.parameter_offload}
    return {
        "kind": r.configuration.kind,
        "stack": r.stack,
        "strategy": strategy,
        "job": job,
        "options": options,
        "model": dict(r.model),
        "understood": dict(r.understood),
        "without_effect": list(r.without_effect),
        "unknown": unknown,
        "notes": list(r.notes),
    }
