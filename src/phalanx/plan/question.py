"""A question as people ask it: names and numbers made into model, cluster and job, or one line that says what is
wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from phalanx.cost.analytic.chips import CHIPS, chip_name, system_of
from phalanx.cost.analytic.stacks import profile
from phalanx.plan.search.column_pricing import Pricing
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import cluster_from_toml, make_model
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec

_MOST = {"--gpus": 10**7, "--batch": 10**9}
"""What a question may ask for at most: beyond it a number is a slip, and its divisors take minutes."""
_PCIE = 64e9  # of generation 5, 16 lanes
_FASTEST_NIC = 100e9
"""Bytes/s in one direction of one GPU's ports between nodes: 800 Gb/s."""


def model_named(name: str) -> tuple[ModelSpec, list[str]]:
    """A preset, a Hugging Face config.json or a folder with one; with notes. Raises InputError."""
    path = Path(name)
    if path.is_dir():
        name = str(path / "config.json")
    return make_model({"config" if name.endswith(".json") else "preset": name}, Path())


def cluster_named(name: str) -> Callable[[int], ClusterSpec]:
    """A preset or a TOML file, of as many nodes as hold so many GPUs. Raises InputError."""
    if name.lower().endswith(".toml"):
        given = cluster_from_toml(Path(name))
        require_plausible(given)

        def of_file(gpus: int) -> ClusterSpec:
            if gpus > given.ranks:
                raise InputError("--gpus", gpus, f"{given.name} has {given.ranks}", "ask for as many, or add nodes")
            return given

        return of_file
    if name == "local":
        mend = "plan a job on it, phalanx plan JOB.toml, or name a cluster, as of phalanx clusters"
        raise InputError("--cluster", name, "is this machine: the rates of its devices are not published", mend)
    node = preset(name, 1).ranks_per_node
    return lambda gpus: preset(name, -(-gpus // node))


def asked(
    model: ModelSpec, cluster: Callable[[int], ClusterSpec], batch: int, seq: int, stack: str
) -> Callable[[int], Pricing]:
    """The question on so many GPUs. Raises InputError."""
    require_counts(("--batch", batch), ("--seq", seq))
    profile(stack)
    job = Job(batch, seq, Precision("bfloat16"))

    def larger(gpus: int) -> Pricing:
        require_counts(("--gpus", gpus))
        found = cluster(gpus)
        system_of(found)
        compute = "bfloat16" if "bfloat16" in found.device.dense_flops_per_s else "float16"
        return Pricing(model, found, replace(job, precision=Precision(compute)), stack)  # type: ignore[arg-type]

    return larger


def require_counts(*given: tuple[str, int]) -> None:
    """Refuse numbers of things that nobody has. Raises InputError."""
    for name, count in given:
        if count < 1:
            raise InputError(name, count, "must be at least 1")
        if count > _MOST.get(name, count):
            raise InputError(name, count, "is more than anybody has", f"at most {_MOST[name]:,}")


def require_plausible(cluster: ClusterSpec) -> None:
    """Refuse links that no such device has: rates of both directions, or in bits. Raises InputError."""
    name = chip_name(cluster.device.name)
    inside, chip = cluster.tiers[0], CHIPS[name]
    limits = [(inside, chip.nvlink, f"{'NVLink' if chip.nvlink > _PCIE else 'PCIe'} of {name}")]
    limits += [(tier, _FASTEST_NIC, "the fastest port of a GPU") for tier in cluster.tiers[1:]]
    for tier, most, what in limits:
        rate = tier.bandwidth_bytes_per_s_per_gpu_per_direction
        if rate > 1.01 * most:
            field = f"cluster.tiers.{tier.name}.bandwidth_bytes_per_s_per_gpu_per_direction"
            reason = f"{what} carries {most / 1e9:g} GB/s in one direction"
            mend = "is it in bits? divide by 8" if rate > 3 * most else "does it count both directions? halve it"
            raise InputError(field, f"{rate:g}", reason, mend)


def of_plan(plan: Plan, stack: str) -> Callable[[int], Pricing]:
    """A plan's own question. Raises InputError for a device of which no rates are known."""
    profile(stack)
    system_of(plan.cluster)
    return lambda gpus: Pricing(plan.model, plan.cluster, plan.job, stack)
