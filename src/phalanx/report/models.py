"""Views of models and clusters: the presets, the parameters of one model by role, tiers of links, and the source of
each number.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import groupby
from string import ascii_uppercase
from typing import Any

from phalanx.answers.presets import ModelShape, PresetClusters, PresetModels
from phalanx.planning.tables.switch_levels import sheet as levels
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.gallery.hardware import bandwidths, hierarchy, switch_levels
from phalanx.report.pictures.figure import Picture
from phalanx.report.view import View
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Attend, Rotary
from phalanx.spec.model.spec import ModelSpec


def view(a: PresetModels | ModelShape) -> View:
    """Show the models that ship, or the shape and the parameters of one."""
    if isinstance(a, PresetModels):
        return View([presets(a.models), *_published_models(a.published)], "models")
    rows = [(role, count, count / a.model.parameter_count) for role, count in a.roles.items()]
    by_role = Sheet("", columns("role | parameters [count] | share [share]"), rows)
    return View([shape(a.name, a.model), layers(a.model), *_efficiency(a), by_role])


def _published_models(names: Sequence[str]) -> Iterator[str]:
    """Yield the further models that Phalanx knows by name, a line for each organisation."""
    yield f"{len(names)} more by their Hugging Face names, however tuned; the organisation may be left out:"
    for organisation, of_it in groupby(sorted(names, key=str.lower), key=lambda name: name.partition("/")[0]):
        yield f"  {organisation}: {', '.join(name.partition('/')[2] for name in of_it)}"


def _efficiency(a: ModelShape) -> Iterator[str]:
    """Yield a line on the parameters and FLOPs of experts, relative to a model with one expert a layer."""
    experts, total = a.model.experts, a.model.parameter_count
    if experts is None:
        return
    of_experts = sum(count for role, count in a.roles.items() if role.startswith("expert_"))
    single = total - of_experts * (1 - 1 / experts.count)
    yield (
        f"experts: {experts.count} times one expert's parameters for {experts.top_k} times its FLOPs; in all "
        f"{total / single:.1f} times the parameters for {a.model.active_count / single:.1f} times the FLOPs a token "
        f"of the model with one expert a layer ({billions(round(single))})"
    )


def presets(models: Mapping[str, ModelSpec]) -> Sheet:
    """Tabulate models: parameters, active parameters, and the main sizes."""
    rows = []
    for name, m in models.items():
        heads = str(m.heads) if m.heads == m.kv_heads else f"{m.heads}/{m.kv_heads}"
        ffn = str(m.ffn) if m.experts is None else f"{m.experts.top_k} of {m.experts.count} x {m.experts.ffn}"
        active = None if m.active_count == m.parameter_count else billions(m.active_count)
        rows.append(
            (name, m.family, billions(m.parameter_count), active, m.layers, m.hidden, heads, ffn, m.vocab, m.max_seq)
        )
    names = columns(
        "model | family | parameters | active | layers [count] | hidden [count] | heads | ffn "
        "| vocab [count] | max seq [count]"
    )
    note = "heads: of queries / of keys and values; active: parameters that one token meets"
    return Sheet("", names, rows, note, charted=False)


def shape(name: str, model: ModelSpec) -> str:
    """Describe a model in two lines: parameters, and the fields that a job file would set."""
    active = f", {model.active_count:,} of them for each token" if model.experts else ""
    stated = [f"{f.name} = {_written(getattr(model, f.name))}" for f in fields(model) if _is_set(model, f)]
    return f"{name}: {model.parameter_count:,} parameters{active}\n{', '.join(stated)}"


def layers(model: ModelSpec) -> str:
    """Return the pattern of a model's layers: a letter and a number for each kind, and the letters in order."""
    blocks, kinds = architecture(model).blocks, architecture(model).kinds
    placed = any(kind.all(Rotary) for kind in kinds)
    names = [
        kind.label + (", no positions" if placed and kind.all(Attend) and not kind.all(Rotary) else "")
        for kind in kinds
    ]
    if len(kinds) == 1:
        return f"{len(blocks)} x {names[0]}"
    letters = {kind: ascii_uppercase[i] if i < 26 else "?" for i, kind in enumerate(kinds)}
    width = len(f"{max(kinds.values())}")
    counts = [f"{letters[kind]}  {kinds[kind]:{width}} x {name}" for kind, name in zip(kinds, names, strict=True)]
    return "\n".join([*counts, "".join(letters[block] for block in blocks)])


def billions(n: int) -> str:
    """Write a number of parameters in billions (B) or millions (M)."""
    return f"{n / 1e9:,.1f} B" if n >= 1e9 else f"{n / 1e6:,.0f} M"


def _is_set(model: Any, field: Any) -> bool:
    return bool(getattr(model, field.name) != field.default)


def _written(value: Any) -> str:
    """Write a value as in TOML."""
    if is_dataclass(value):
        shown = [f for f in fields(value) if _is_set(value, f)]
        inner = ", ".join(f"{f.name} = {_written(getattr(value, f.name))}" for f in shown)
        return f"{{ {inner} }}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def clusters(a: PresetClusters) -> View:
    """Show clusters; a single one with its levels of switches and the sources of its numbers."""
    parts: list[str | Sheet] = [cluster_table(a.clusters)]
    if a.alone:
        parts += [levels(a.clusters[0]), *cluster_sources(a.clusters[0])]
    return View(parts, "clusters", lambda: _pictures(a))


def _pictures(a: PresetClusters) -> list[Picture]:
    spec = a.clusters[0]
    return [hierarchy(spec.name, spec.ranks), switch_levels(spec.name, spec.ranks)] if a.alone else [bandwidths()]


def cluster_table(clusters: Sequence[ClusterSpec]) -> Sheet:
    """Tabulate clusters, with a row for each tier."""
    rows = []
    for spec in clusters:
        device = spec.device
        half = device.dense_flops_per_s.get("bfloat16")
        peak = f"{half / 1e12:g}" if half else f"{device.dense_flops_per_s['float16'] / 1e12:g} fp16"
        for i, tier in enumerate(spec.tiers):
            about = (spec.name, device.name, device.usable_bytes, peak) if i == 0 else ("", "", None, "")
            uplink = tier.uplink_bandwidth_bytes_per_s_per_direction
            shared = "" if uplink is None else f", {uplink / 1e9:g} shared"
            rate = tier.bandwidth_bytes_per_s_per_gpu_per_direction / 1e9
            rows.append((*about, tier.ranks, rate, tier.name + shared))
    names = columns("preset | device | usable [bytes] | TFLOP/s | ranks [count] | GB/s per rank [number] | links")
    note = "TFLOP/s: dense, bf16 unless marked fp16; GB/s in one direction; ranks: joined by these links"
    return Sheet("", names, rows, note, charted=False)


def cluster_sources(spec: ClusterSpec) -> Iterator[str]:
    """Yield the sources of a cluster's numbers, a line for the device and one for each tier."""
    yield f"{spec.device.name}: {spec.device.origin}: {spec.device.source}"
    for tier in spec.tiers:
        yield f"{tier.name}: {tier.origin}: {tier.source}; latency {tier.latency_s * 1e6:g} µs, estimated"
    yield "rates of computation: estimated from the datasheet, until `phalanx measure` has run there"
