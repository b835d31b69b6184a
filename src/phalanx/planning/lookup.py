"""Resolution of a user's question: names and numbers turned into model, cluster and job, or a one-line error."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from phalanx.cost.analytic.chips import chip_name, system_of
from phalanx.cost.analytic.profile import profile
from phalanx.planning.search.column_pricing import Pricing
from phalanx.spec.cluster.calibration import Calibration
from phalanx.spec.cluster.chips import BRIDGE_LINK, BRIDGE_LINKS, CHIPS, alone
from phalanx.spec.cluster.presets import Counted, LikePreset, counted, preset
from phalanx.spec.cluster.spec import LARGEST_HOST, ClusterSpec
from phalanx.spec.documents import read_toml
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files import job_file
from phalanx.spec.files.cluster_toml import calibration_table, cluster_from_toml
from phalanx.spec.files.job_file import build, make_model
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.presets import PRESETS as MODELS
from phalanx.spec.model.spec import MODEL_FIELDS, ModelSpec

_LARGEST_COUNTS = {"gpus": 10**7, "batch": 10**9}
"""Upper limits: a larger number is a typing error, and enumerating its divisors would take minutes."""
_PCIE = 64e9  # bytes/s, generation 5, 16 lanes
_FASTEST_NIC = 100e9
"""Bytes/s in one direction of one GPU's ports between nodes: 800 Gb/s."""


def model_named(name: str) -> tuple[ModelSpec, list[str]]:
    """Load a model by preset name, Hugging Face config.json or folder with one, or a TOML file with a table [model];
    return it with notes for the user.

    Raises InputError for an unknown name or an unusable file."""
    path = Path(name)
    try:
        folder = name not in MODELS and path.is_dir()
    except OSError:  # too long for a path
        folder = False
    if folder:
        name = str(path / "config.json")
    if name.lower().endswith(".toml"):
        content = read_toml(path, "model")
        return make_model(content.get("model", content), path.parent)
    return make_model({"config" if name.endswith(".json") else "preset": name}, Path())


def with_changes(model: ModelSpec, changes: Sequence[str]) -> ModelSpec:
    """Return a model with the fields of lines such as model.max_seq=32768 set. Raises InputError."""
    table = stated_changes(changes)
    return build(ModelSpec, asdict(model) | table, "model") if table else model


def stated_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a model that lines such as model.max_seq=32768 set. Raises InputError."""
    tables = job_file.override({"model": {}}, changes)
    if others := [name for name in tables if name != "model"]:
        line = next(line for line in changes if line.startswith(others[0]))
        raise InputError(
            "set", line, "is not a field of the model", "write model.FIELD=VALUE, e.g. model.max_seq=32768"
        )
    table: dict[str, Any] = tables["model"]
    for name, value in table.items():
        if name not in MODEL_FIELDS:
            raise InputError(f"model.{name}", value, "no such field", nearest(name, MODEL_FIELDS))
    return table


def cluster_named(name: str) -> Callable[[int], ClusterSpec]:
    """Look up a cluster by preset name or TOML file; return a function from a number of GPUs to the cluster.

    A preset gets as many nodes as the GPUs need; of racks and pods, an equal part each if the GPUs divide evenly.
    A name may count GPUs (`gpus_in`). Raises InputError for an unknown name or an unusable file."""
    if name.lower().endswith(".toml"):
        cluster = cluster_from_toml(Path(name))
        require_plausible(cluster)
        return lambda gpus: _with_gpus(cluster, gpus)
    if name == "local":
        remedy = "plan a job on it with phalanx plan JOB.toml, or name a cluster that phalanx tables clusters lists"
        raise InputError("cluster", name, "is this machine: the rates of its devices are not published", remedy)
    if (some := counted(name)) is not None:
        return _of_counted(name, some)
    node = preset(name, 1).ranks_per_node

    def on(gpus: int) -> ClusterSpec:
        nodes = -(-gpus // node)
        if node <= LARGEST_HOST or nodes < 2 or gpus % nodes or gpus == nodes * node:
            return preset(name, nodes)
        return LikePreset(name, nodes, gpus // nodes).cluster()

    return on


def gpus_in(cluster: str | ClusterSpec | None) -> int | None:
    """Return the number of GPUs that the name of a cluster counts, such as 8xH100; None: it counts none."""
    some = counted(cluster) if isinstance(cluster, str) and not cluster.lower().endswith(".toml") else None
    return None if some is None else some.gpus


def _of_counted(name: str, some: Counted) -> Callable[[int], ClusterSpec]:
    """Return the cluster of a number of GPUs among those that `name` counts; of whole nodes there may be more."""
    node = some.per_node or preset(some.preset, 1).ranks_per_node
    if some.gpus < 1:
        raise InputError("cluster", name, "has no GPU")

    def on(gpus: int) -> ClusterSpec:
        if gpus > some.gpus and (some.per_node or some.gpus % node):
            raise InputError("gpus", gpus, f"is more than {name} has", f"name the kind of cluster: {some.preset}")
        if some.per_node is None:
            return cluster_named(some.preset)(gpus)
        return LikePreset(some.preset, -(-gpus // node), node).cluster()

    return on


def with_calibration(cluster: ClusterSpec, file: Path | None) -> ClusterSpec:
    """Return a cluster with the factors of a calibration's file. Raises InputError."""
    return cluster if file is None else replace(cluster, calibration=calibration_of(file))


def calibration_of(file: Path) -> Calibration:
    """Return the calibration in a file. Raises InputError."""
    return build(Calibration, calibration_table(file), "calibration")


def stack_on(cluster: str | ClusterSpec | None) -> str:
    """Return the stack of a question that names none: MaxText on TPUs, else Megatron-Core. Raises InputError."""
    on_tpus = cluster is not None and cluster_on(cluster)(1).device.is_tpu
    return "maxtext" if on_tpus else "megatron-core"


def cluster_on(cluster: str | ClusterSpec | None, calibration: Path | None = None) -> Callable[[int], ClusterSpec]:
    """Return a function from a number of GPUs to the cluster, which is given by name or as a ClusterSpec; with the
    factors in the file `calibration`. Raises InputError."""
    if isinstance(cluster, ClusterSpec):
        require_plausible(cluster)
        own = with_calibration(cluster, calibration)
        return lambda gpus: _with_gpus(own, gpus)
    on = cluster_named(str(cluster))
    if calibration is None:
        return on
    with_calibration(on(1), calibration)  # so that a wrong file is refused before anything is searched
    return lambda gpus: with_calibration(on(gpus), calibration)


def _with_gpus(cluster: ClusterSpec, gpus: int) -> ClusterSpec:
    if gpus > cluster.ranks:
        raise InputError("gpus", gpus, f"{cluster.name} has {cluster.ranks}", "ask for as many, or add nodes")
    return cluster


def pricing_by_gpus(
    model: ModelSpec, cluster: Callable[[int], ClusterSpec], batch: int, seq: int, stack: str, headroom: float = 0.0
) -> Callable[[int], Pricing]:
    """Return a function from a number of GPUs to the Pricing on that many.

    `headroom` is for searches: the share of a device's memory that a strategy must leave free.
    Raises InputError for impossible counts, an unknown stack, or a device without published rates."""
    require_counts(("batch", batch), ("seq", seq))
    profile(stack)
    job = Job(batch, seq, Precision("bfloat16"))

    def larger(gpus: int) -> Pricing:
        require_counts(("gpus", gpus))
        spec = cluster(gpus)
        spec = replace(spec, device=alone(spec.device)) if gpus == 1 else spec
        system_of(spec)
        compute = "bfloat16" if "bfloat16" in spec.device.dense_flops_per_s else "float16"
        return Pricing(model, spec, replace(job, precision=Precision(compute)), stack, headroom=headroom)  # type: ignore[arg-type]

    return larger


def require_counts(*given: tuple[str, int]) -> None:
    """Raise InputError unless every (name, count) is at least 1 and below its upper limit."""
    for name, count in given:
        if count < 1:
            raise InputError(name, count, "must be at least 1")
        if count > _LARGEST_COUNTS.get(name, count):
            raise InputError(name, count, "is more than any cluster has", f"at most {_LARGEST_COUNTS[name]:,}")


def require_plausible(cluster: ClusterSpec) -> None:
    """Raise InputError if a link is faster than the device allows: its rate may be of both directions, or in bits."""
    name = chip_name(cluster.device.name)
    inside, chip = cluster.tiers[0], CHIPS[name]
    card = chip.link_bytes_per_s <= _PCIE
    bridged = card and inside.name == "nvlink"  # two cards with a bridge
    most = BRIDGE_LINK * BRIDGE_LINKS if bridged else chip.link_bytes_per_s
    limits = [(inside, most, f"{'PCIe' if card and not bridged else 'NVLink'} of {name}")]
    limits += [(tier, _FASTEST_NIC, "the fastest port of a GPU") for tier in cluster.tiers[1:]]
    for tier, most, what in limits:
        rate = tier.bandwidth_bytes_per_s_per_gpu_per_direction
        if rate > 1.01 * most:
            field = f"cluster.tiers.{tier.name}.bandwidth_bytes_per_s_per_gpu_per_direction"
            reason = f"{what} carries {most / 1e9:g} GB/s in one direction"
            remedy = "is it in bits? divide by 8" if rate > 3 * most else "does it count both directions? halve it"
            raise InputError(field, f"{rate:g}", reason, remedy)


def pricing_of_plan(plan: Plan, stack: str) -> Callable[[int], Pricing]:
    """Return a function from any number of GPUs to a plan's own Pricing. Raises InputError for a device without
    published rates."""
    profile(stack)
    system_of(plan.cluster)
    return lambda gpus: Pricing(plan.model, plan.cluster, plan.job, stack)
