"""The models and clusters that ship, or one that a file describes."""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.answers.answer import Answer, plain
from phalanx.planning.lookup import model_named
from phalanx.planning.tables.switch_levels import sheet as switch_levels
from phalanx.spec.cluster.presets import PRESETS as CLUSTERS
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files.cluster_toml import cluster_from_toml
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.presets import PRESETS as MODELS
from phalanx.spec.model.presets import PUBLISHED
from phalanx.spec.model.spec import ModelSpec, parameters


@dataclass(frozen=True)
class PresetModels(Answer):
    """The models that ship, by name."""

    models: dict[str, ModelSpec]
    published: tuple[str, ...] = ()
    """Further models that are known by their Hugging Face names."""


@dataclass(frozen=True)
class ModelShape(Answer):
    """One model: its shape, and its parameters by role."""

    name: str
    model: ModelSpec
    roles: dict[str, int]
    """Parameters by role, in the order in which a token meets them."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PresetClusters(Answer):
    """Clusters that ship."""

    clusters: tuple[ClusterSpec, ...]
    alone: bool
    """Whether one was asked for by its name."""


@plain.register
def _(value: PresetModels) -> dict[str, Any]:
    return {name: {**_counts(m), **asdict(m)} for name, m in value.models.items()}


@plain.register
def _(value: ModelShape) -> dict[str, Any]:
    layers = [{"layers": count, "kind": kind.label} for kind, count in architecture(value.model).kinds.items()]
    return {"model": asdict(value.model), **_counts(value.model), "kinds": layers, "roles": value.roles}


@plain.register
def _(value: PresetClusters) -> list[dict[str, Any]]:
    return [{**asdict(spec), "levels": plain(switch_levels(spec).records())} for spec in value.clusters]


def _counts(model: ModelSpec) -> dict[str, int]:
    return {"parameters": model.parameter_count, "active": model.active_count}


def models() -> PresetModels:
    """Return the models that ship."""
    return PresetModels({name: make_model({"preset": name}, Path())[0] for name in MODELS}, tuple(PUBLISHED))


def model(name: str) -> ModelShape:
    """Return a model by its preset's name, its config.json, the folder of one, or TOML. Raises InputError."""
    spec, notes = model_named(name)
    roles: Counter[str] = Counter()
    for p in parameters(spec):
        roles[p.role] += p.numel
    return ModelShape(name, spec, dict(roles), tuple(notes))


def clusters(name: str | None, nodes: int | None = None) -> PresetClusters:
    """Return the clusters that ship, or the named one, with `nodes` nodes each (32 by default); or the cluster of a
    TOML file. Raises InputError."""
    if name and name.lower().endswith(".toml"):
        if nodes is not None:
            raise InputError("nodes", nodes, f"is said by {name}", "leave it out")
        return PresetClusters((cluster_from_toml(Path(name)),), True)
    each = [name] if name else list(CLUSTERS)
    return PresetClusters(tuple(preset(n, 32 if nodes is None else nodes) for n in each), name is not None)
