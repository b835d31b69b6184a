"""Mapping from our parameters to Hugging Face tensors, or parts of them: a row for each family (namings.toml), and
one formula.

Row r of our tensor, (rows, width), is row `first + r // run * stride + r % run` of the Hugging Face tensor, or that
column if the Hugging Face tensor is (in, out):

    full tensors                                   first = 0        run = stride = rows
    gpt2's c_attn, q above k above v               first = j rows   run = rows      stride = 3 rows
    gpt_neox's query_key_value, head by head       first = j d      run = d         stride = 3 d     (d = head_dim)
    several of ours in one tensor, in g groups     first = what is before in a group, run = rows / g, stride = all / g
    such as all experts' gates and ups             g = experts; the tensor is (g, rows of an expert, width)

Every expert has a tensor of its own; in order they are the parts of ours. Some families store norm weights less one.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from torch import Tensor

from phalanx.nn.functional import accumulate_dtype
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Attend, Scan
from phalanx.spec.model.spec import ModelSpec, Parameter, buffers, parameters
from phalanx.spec.rows import Rows, Table, record

_FILE = Path(__file__).with_name("namings.toml")


@dataclass(frozen=True)
class JoinedModules:
    """Modules of ours, in order, whose tensors are joined to one in a file: as a whole, or within each of its
    groups."""

    tensor: str
    parts: tuple[str, ...]
    groups: Literal["", "heads", "key heads"] = ""


@dataclass(frozen=True)
class Naming:
    """Names of a model family: our module, or parameter -> the Hugging Face one, with a star for the number of an
    expert. `base` is the prefix of all but the head, and may be missing in a file."""

    base: str
    block: str
    outside: dict[str, str]
    inside: dict[str, str]
    joined: tuple[JoinedModules, ...] = ()
    transposed: bool = False  # matrices of blocks are (in, out)
    buffers: str = r"(?!)"  # non-parameters in older files
    balance: str = ""  # the experts' balance biases
    recurrent: Naming | None = None  # blocks with a recurrence in place of attention
    less_one: tuple[str, ...] = ()  # modules whose weights are stored less one
    also: tuple[str, ...] = ("", "")  # a part of names in other files, and what it is here
    spread: tuple[str, ...] = ()  # vectors (n,) that are stored as (1, 1, n, 1)


@cache
def _modules() -> Table:
    return tomllib.loads(_FILE.read_text())["modules"]  # type: ignore[no-any-return]


def _naming(name: str, table: Table) -> Naming:
    """Return the Naming of a row. `recurrent` in the table has the fields that differ in blocks with a recurrence."""
    stated = {field: value for field, value in table.items() if field != "recurrent"}
    modules = {
        field: {ours: theirs for part in table[field] for ours, theirs in _modules()[part].items()}
        for field in ("outside", "inside")
    }
    naming = record(Naming)(name, stated | modules)
    differs = table.get("recurrent")
    return naming if differs is None else replace(naming, recurrent=_naming(name, stated | differs))


NAMINGS = Rows(_FILE, _naming, lambda name: name != "modules")
"""The rows by model_type."""


@dataclass(frozen=True)
class Source:
    """The place of a parameter, or of a part of it, in a Hugging Face file. `tensor`, `shape`: of the Hugging Face
    tensor; `first`, `run`, `stride`: as in the formula above; `transposed`: whether it is stored as (in, out)."""

    tensor: str
    shape: tuple[int, ...]
    first: int
    run: int
    stride: int
    transposed: bool = False
    less: float = 0.0
    """Added to the stored numbers, before `factor`, to get ours."""
    factor: float = 1.0
    """Stored numbers are multiplied by it to get ours."""
    grouped: bool = False
    """Whether the first dimension counts groups, and rows are of the first two together."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the tensor with its rows first."""
        if len(self.shape) == 4:  # of a vector
            return self.shape[2:3]
        if self.grouped:
            return (self.shape[0] * self.shape[1], *self.shape[2:])
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def ours(self) -> tuple[int, ...]:
        """The shape of our tensor, or of that part of it, with groups and rows as one."""
        rows, *others = self.rows
        return (rows // self.stride * self.run, *others)

    def ours_of(self, stored: Tensor) -> Tensor:
        """Return our numbers, given stored ones."""
        if not self.less and self.factor == 1:
            return stored
        return (stored.to(accumulate_dtype(stored.dtype)) + self.less) * self.factor

    def theirs_of(self, ours: Tensor) -> Tensor:
        """Return stored numbers, given ours."""
        if not self.less and self.factor == 1:
            return ours
        return ours.to(accumulate_dtype(ours.dtype)) / self.factor - self.less


_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def source(spec: ModelSpec, p: Parameter) -> tuple[Source, ...]:
    """Return the location of a parameter in this model's Hugging Face files, as saved by `transformers`, in equal
    parts."""
    factor = _factor(spec, p)
    places = _source(spec, p)
    return places if factor == 1 else tuple(replace(place, factor=factor) for place in places)


def _factor(spec: ModelSpec, p: Parameter) -> float:
    """Return the factor by which a parameter includes the model's multipliers: the head's norm that of the logits,
    queries or their norm that of attention, last products or norms after them that of the residual."""
    m, module = spec.multipliers, p.fqn.rpartition(".")[0]
    if m is None or p.role == "balance":
        return 1.0
    block = _BLOCK.fullmatch(module)
    if block is None:
        of_ends: dict[str, float] = {
            "embed.token": m.embedding,
            "head.norm": m.logits / (m.embedding if spec.tied else 1.0),
        }
        return of_ends.get(module, 1.0)
    _, rest = block.groups()
    if rest == ("attention.q_norm" if spec.qk_norm else "attention.q") and m.attention is not None:
        return m.attention * math.sqrt(spec.head_dim)
    after = spec.norms != "before"
    adds = rest.endswith("_after") if after else rest.rpartition(".")[2] in ("o", "down")
    return m.residual if adds else 1.0


def _source(spec: ModelSpec, p: Parameter) -> tuple[Source, ...]:
    naming = NAMINGS[spec.family]
    module, kind = p.fqn.rsplit(".", 1)
    rows = p.shape[0]
    block, subtracted = _BLOCK.fullmatch(module), 0.0
    if block is None:
        base = "" if module == "head.linear" else naming.base
        subtracted = float(kind == "weight" and module in naming.less_one)
        return (Source(f"{base}{naming.outside[module]}.{kind}", p.shape, 0, rows, rows, less=subtracted),)
    number, rest = block.groups()
    if naming.recurrent is not None and architecture(spec).blocks[int(number)].first(Scan) is not None:
        naming = naming.recurrent
    transposed = naming.transposed and len(p.shape) == 2
    prefix = f"{naming.base}{naming.block}.{number}"
    if p.role == "balance":
        return (Source(f"{prefix}.{naming.balance}", p.shape, 0, rows, rows),)
    for joined in naming.joined:
        if rest in joined.parts:
            return (_place_in_joined(spec, joined, int(number), rest, kind, p, prefix, transposed),)
    if p.of_experts and "*" in naming.inside[rest]:
        each, out = f"{prefix}.{naming.inside[rest]}.{kind}", p.shape[1]
        return tuple(Source(each.replace("*", str(e)), p.shape[1:], 0, out, out) for e in range(rows))
    shape = p.shape[::-1] if transposed else p.shape
    name = naming.inside.get(f"{rest}.{kind}") or f"{naming.inside[rest]}.{kind}"
    subtracted = float(kind == "weight" and rest in naming.less_one)
    shape = (1, 1, rows, 1) if f"{rest}.{kind}" in naming.spread else shape
    return (Source(f"{prefix}.{name}", shape, 0, rows, rows, transposed, subtracted),)


def _place_in_joined(
    spec: ModelSpec,
    joined: JoinedModules,
    block: int,
    rest: str,
    kind: str,
    p: Parameter,
    prefix: str,
    transposed: bool,
) -> Source:
    """Return the place of a parameter in a tensor that joins several."""
    every = _by_name(spec)
    all_parts = [every[f"blocks.{block}.{part}.{kind}"] for part in joined.parts]
    groups = 1
    if joined.groups == "heads":
        groups = all_parts[0].dims[0].count
    elif joined.groups == "key heads":
        held = architecture(spec).blocks[block]
        scan, attend = held.first(Scan), held.first(Attend)
        groups = attend.kv.count if attend is not None else scan.groups.count if scan is not None else 1
    at = joined.parts.index(rest)
    if p.of_experts:
        experts, *each = p.shape
        run, n = each[0], len(joined.parts)
        whole = (experts, n * run, *each[1:])
        return Source(f"{prefix}.{joined.tensor}.{kind}", whole, at * run, run, n * run, grouped=True)
    runs = [part.shape[0] // groups for part in all_parts]
    inner = (1, *p.shape[1:]) if p.role == "conv" else p.shape[1:]
    whole = (sum(runs) * groups, *inner)
    shape = whole[::-1] if transposed else whole
    return Source(f"{prefix}.{joined.tensor}.{kind}", shape, sum(runs[:at]), runs[at], sum(runs), transposed)


@lru_cache(maxsize=16)
def _by_name(spec: ModelSpec) -> dict[str, Parameter]:
    return {p.fqn: p for p in parameters(spec)}


def sources(spec: ModelSpec) -> dict[str, tuple[Source, ...]]:
    """Return the sources of every parameter, and of the family's buffers, by our names. Raises InputError for a
    family without a naming."""
    if spec.family not in NAMINGS:
        reason = "has no Hugging Face weights that this decoder takes"
        raise InputError("model.family", spec.family, reason, nearest(spec.family, NAMINGS))
    learned = buffers(spec) if NAMINGS[spec.family].balance else ()
    return {p.fqn: source(spec, p) for p in (*parameters(spec), *learned)}


def plain_name(family: str, tensor: str) -> str:
    """Normalize a tensor's name; files of one family differ in the base model's prefix, and in transformers 5 in the
    head's name."""
    naming = NAMINGS[family]
    other, name = naming.also
    if tensor == "lm_head.weight":
        return f"{naming.outside['head.linear']}.weight"
    return tensor.removeprefix(naming.base).replace(other, name)


def is_buffer(spec: ModelSpec, tensor: str) -> bool:
    """Whether a tensor, by its plain name, is not a parameter: a buffer of older files, or a tied head's copy."""
    naming = NAMINGS[spec.family]
    head = f"{naming.outside['head.linear']}.weight"
    return bool(re.fullmatch(naming.buffers, tensor)) or (spec.tied and tensor == head)
