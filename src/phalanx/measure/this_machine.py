"""This machine as a ClusterSpec: measured once under the concurrency of the run, then cached.

The cache key holds everything that makes a measurement stale: processor, cores, memory, GPUs, torch. If the
measurement is cached, torch is not imported.
"""

import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.measure.steal_time import disturbances, quiet_now
from phalanx.runtime.process.folder import cache_folder
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.documents import read_json, seal
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.files.plan import write_json
from phalanx.spec.job import DType

_BUSY = "; meanwhile "
"""In the source of a measurement: why its rates may be too low."""
_KEPT_S = 3600.0
PATIENCE_S = 1800.0
"""Timeout of ranks that take no part in a level, and wait for the others: four on two busy cores took over 300 s."""
VERSION = 12  # of the measurement; caches of other versions are ignored


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fingerprint() -> dict[str, Any]:
    """Return the properties that determine the machine's performance, without importing torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    gpus = sorted(p.read_text().splitlines()[0] for p in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = gpus[: len([v for v in visible.split(",") if v.strip() not in ("", "-1")])]
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = ""
    return {
        "cpu": sorted(models) or [os.uname().machine],
        "cores": cores(),
        "memory_bytes": _memory_bytes(),
        "gpus": gpus,
        "torch": torch_version,
    }


def _memory_bytes() -> int:
    """Return the memory of the machine, or of the container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total


def rank_memory_bytes() -> int:
    """Return the memory of a rank's GPU or, without one, of the machine, which its ranks share."""
    return _gpu_memory() if fingerprint()["gpus"] else _memory_bytes()


def default_ranks() -> int:
    """Return the number of ranks for this machine: one per GPU, or else one per core."""
    return len(fingerprint()["gpus"]) or cores()


def local_cluster(
    ranks: int,
    dtype: DType,
    threads: int,
    *,
    anew: bool = False,
    quick: bool = False,
    announce: Callable[[str], None] = lambda _: None,
) -> ClusterSpec:
    """Return this machine with `ranks` ranks, measured or from the cache (`anew`: measured in any case; `quick`: in
    few rounds, less exactly). A quick measurement is used until there is a full one, and one of a busy machine until
    it is quiet.

    Measurements before an interruption are kept, and not repeated within an hour. `announce` is called with notes for
    the user. Raises InputError if a measurement is needed and torch is missing.
    """
    machine = fingerprint()
    key = {"version": VERSION, "ranks": ranks, "dtype": dtype, "threads": threads, **machine}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder() / "machines"
    full, short = folder / f"{digest}.json", folder / f"{digest}.quick.json"
    # A cached measurement.
    for path in (full, short) if not anew else ():
        if path.exists():
            try:
                kept = read_json(path, "cache")
                sound = kept.pop("seal") == seal(kept)
                cluster = build(ClusterSpec, kept if sound else None, "cluster")
            except (InputError, AttributeError, KeyError, TypeError):
                announce(f"{path} is damaged; measuring again")
                continue
            if path == short:
                announce("note: this machine was measured quickly; `phalanx measure` measures it well")
            _, busy, why = cluster.device.source.partition(_BUSY)
            if busy and quiet_now(ranks * threads):
                announce(f"this machine was measured while {why}, and is quiet now; measuring again")
                break
            if busy:
                announce(f"note: while this machine was measured, {why}; `phalanx measure` measures it again")
            return cluster
    # Measure, from where an interrupted measurement stopped.
    path = short if quick else full
    if not machine["torch"]:
        remedy = "pip install '.[train]' in a checkout, or plan for a preset such as dgx-h100"
        raise InputError("cluster.preset", "local", "measuring this machine needs torch", remedy)
    folder.mkdir(exist_ok=True)
    interrupted = path.with_suffix(".kept")
    if interrupted.exists():
        if time.time() - interrupted.stat().st_mtime > _KEPT_S:
            interrupted.unlink()
        else:
            announce("what was measured before the interruption is kept")
    each = f"{threads} thread{'s' * (threads > 1)} each"
    announce(f"measuring this machine ({ranks} rank{'s' * (ranks > 1)}, {dtype}, {each}) ...")
    try:
        with disturbances(announce, ranks * threads) as reasons:
            rows = _measure(ranks, dtype, threads, quick, interrupted)
    except KeyboardInterrupt:
        if interrupted.exists():
            announce("what was measured is kept for an hour; the same command goes on from there")
        raise
    # Cache it.
    interrupted.unlink(missing_ok=True)
    described = describe(machine, ranks, dtype, rows)
    described["device"]["source"] += _BUSY * bool(reasons) + " and ".join(reasons)
    cluster = build(ClusterSpec, described, "cluster")
    tables = json.loads(json.dumps(asdict(cluster)))
    write_json(path, tables | {"seal": seal(tables)})
    return cluster


def _measure(ranks: int, dtype: DType, threads: int, quick: bool, kept: Path) -> dict[str, Any]:
    from phalanx.runtime.process.folder import private_folder
    from phalanx.runtime.process.launch import launch

    with private_folder() as (folder, _):
        out = folder / "measured.json"
        argument = json.dumps(
            {"out": str(out), "dtype": dtype, "threads": threads, "quick": quick, "kept": str(kept)}
        )
        launch("phalanx.measure.worker", argument, ranks, threads, timeout_s=PATIENCE_S)
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def describe(machine: dict[str, Any], ranks: int, dtype: DType, rows: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a ClusterSpec from measured `rows` (worker.table_rows)."""
    last = rows["kernels"][-1]
    on_gpu = bool(machine["gpus"])
    # Without a measurement, the link is described by the rate that torch's own all-reduce achieves on it.
    fits = [f for f in rows["collectives"] if (f["op"], f["transport"], f["hosts"]) == ("all_reduce", "native", 1)]
    beta = fits[-1]["beta_s_per_byte"] if fits else 0.0
    # Ring all-reduce: 2(p-1)/p bytes over the link per byte of the buffer.
    bandwidth = 2 * (ranks - 1) / ranks / beta if beta else 1e10
    memory = _gpu_memory() if on_gpu else machine["memory_bytes"] // ranks
    device = {
        "name": machine["gpus"][0].split(":")[-1].strip() if on_gpu else machine["cpu"][0],
        "kind": "cuda" if on_gpu else "cpu",
        "memory_bytes": memory,
        "usable_bytes": int(memory * 0.9),
        "memory_bandwidth_bytes_per_s": 1 / last["optimizer_per_byte"],
        "dense_flops_per_s": {dtype: last["peak_flops_per_s"]},
        "narrow_flops_per_s": {name: 1 / s for name, s in last["forward"].get("per_narrow_flop", {}).items()},
        "own_communication_engine": on_gpu,
        "origin": "measured",
        "source": "phalanx measure on this machine; usable: nine tenths",
    }
    tier = {
        "name": "host",
        "ranks": ranks,
        "latency_s": fits[-1]["alpha_s"] / (2 * (ranks - 1)) if fits else 0.0,
        "bandwidth_bytes_per_s_per_gpu_per_direction": bandwidth,
        "origin": "measured" if fits else "estimated",
        "source": "all-reduce between the ranks of this host" if fits else "one rank: nothing to measure",
    }
    gamma = next((f["value"] for f in rows.get("figures", ()) if f["name"] == "gamma"), None)
    device["gamma_s_per_byte"] = gamma
    parts = {"device": device, "tiers": [tier], "kernels": rows["kernels"]}
    parts |= {name: rows[name] for name in ("collectives", "figures") if name in rows}
    return {"name": "local", "ranks_per_node": ranks, "nodes": 1, **parts}


def _gpu_memory() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory
