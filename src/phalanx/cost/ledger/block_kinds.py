"""From the operators of a block to a BlockKind: the columns to which each operator contributes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.cost.ledger.kind import BlockKind
from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.block import Block, Sublayer, products_of
from phalanx.spec.model.blocks.operators import (
    GATED,
    Activate,
    Attend,
    Conv,
    Dim,
    Expand,
    Index,
    Linear,
    Norm,
    Router,
    Scan,
)

_SCAN_FLOPS = {"delta": 8, "channel_delta": 8, "ssd": 7, "lightning": 4, "selective": 9}
"""FLOPs per token and element of the state, forward, token by token: delta and ssd as Megatron-LM d98e8a6 counts them
(megatron/training/training.py:902, :957); lightning writes and reads the state; selective as its authors count it
(github.com/state-spaces/mamba/issues/110)."""
_DELTA = ("delta", "channel_delta")


def kind_of(block: Block, count: int, hidden: int, windowed: float, window: int) -> BlockKind:
    """Return the kind of `count` equal blocks, of which the share `windowed` attends within `window` tokens. Raises
    InputError for a mechanism without a price."""
    columns: dict[str, Any] = {}
    for s in block.sublayers:
        for name, value in (_attention(s) | _mixer(s) | _inner(s)).items():
            if name in columns:
                raise InputError("model.pattern", block.label, "has two of a kind in one block", "give each its own")
            columns[name] = value
    norms = [s.norm for s in block.sublayers if s.norm is not None]
    after = [s.after for s in block.sublayers if s.after is not None]
    return BlockKind(
        label=block.label,
        count=count,
        hidden=hidden,
        sublayers=len(block.sublayers),
        streams=block.streams,
        norms=len(norms),
        after_norms=len(after),
        rms=float(any(n.kind == "rms" for n in (*norms, *after))),
        parallel=float(block.residual != "serial"),
        window_share=windowed,
        window=window,
        **columns,
        **_parameters(block),
    )


def _attention(s: Sublayer) -> dict[str, Any]:
    """Return the columns of softmax attention."""
    attend = s.first(Attend)
    if attend is None:
        return {}
    if s.first(Router) is not None:
        raise InputError("model.mixers", s.name, "has experts of queries and results, which have no price yet")
    expand, index = s.first(Expand), s.first(Index)
    query = _writes(s, "q")
    latent: dict[str, Any] = {"q_rank": 0 if query.x == "n" else query.inner}
    if any(p.grouped for p in products_of(s)):
        latent |= _compressed(s, attend)
    elif expand is not None:
        latent |= {"kv_rank": _writes(s, expand.up).inner, "rope_dim": attend.key - expand.nope}
    outputs = [out for p in products_of(s) for out in p.y]
    key_width = attend.key + attend.value
    if expand is None:
        key_width = sum(out.dim.size for out in outputs if out.name in ("k", "v", "kv")) // attend.kv.count
    columns: dict[str, Any] = {
        "heads": attend.y.dim.count,
        "kv_heads": attend.kv.count,
        "head_dim": attend.key,
        "value_dim": attend.value,
        "kv_width": key_width,
        "core_dim": attend.core,
        "top": attend.top or 0,
        "normed_heads": float(any(isinstance(op, Norm) and op.x == "q" for op in s.operators)),
        "gate": sum(out.dim.size for out in outputs if out.name == "gate"),
    }
    if index is not None:
        outs = (index.heads * index.each, index.each, index.heads)
        columns["index"] = sum(n * k for n, k in zip(outs, index.into, strict=True)) + latent.pop("index", 0)
        columns["index_pair"] = index.heads * (index.each + 1) / index.ratio
        columns["index_kept"] = sum(outs) + latent.pop("index_kept", 0)
    return columns | latent


def _compressed(s: Sublayer, attend: Attend) -> dict[str, Any]:
    """Return the columns of attention to compressed keys (DeepSeek-V4): products whose results are pooled into
    compressed keys, and low-rank results by groups of heads."""
    low = next(p for p in products_of(s) if p.grouped)
    pooled = [p for p in products_of(s) if any(out.name.endswith(".kv") or out.name.endswith(".gate") for out in p.y)]
    outs = [out.dim.size for p in pooled for out in p.y]
    return {
        "ratio": attend.compressed or math.inf,
        "result_low": low.y[0].dim.size,
        "result_rank": low.y[0].dim.each,
        "index": sum(p.inner * out.dim.size for p in pooled for out in p.y),
        "index_kept": sum(outs),
    }


def _writes(s: Sublayer, name: str) -> Linear:
    """Return the product that writes a tensor."""
    return next(p for p in products_of(s) if any(out.name == name for out in p.y))


def _mixer(s: Sublayer) -> dict[str, Any]:
    """Return the columns of a recurrence, or of a convolution without one."""
    scan, conv = s.first(Scan), s.first(Conv)
    if scan is None and conv is None:
        return {}
    first, *others = products_of(s)
    *inner, last = others
    kept = _SavedElements(s)
    columns: dict[str, Any] = {
        "mixed": sum(out.dim.size for out in first.y if out.dim.axis and not out.dim.copies),
        "mixed_shared": sum(out.dim.size for out in first.y if out.dim.copies),
        "mixed_whole": sum(out.dim.size for out in first.y if not out.dim.axis),
        "mixed_low": sum(p.inner * out.dim.size for p in inner for out in p.y),
        "mixed_out": last.inner,
        "mixed_kept": kept.elements,
        "mixed_shared_kept": kept.shared,
    }
    if conv is not None:
        channels = sum(dim.size for dim in conv.channels)
        columns |= {"conv": conv.taps * channels, "conv_channels": channels}
    if scan is not None:
        read = [out.dim for p in products_of(s) for out in p.y if out.name in scan.x]
        state = scan.y.dim.count * scan.y.dim.each * scan.state
        columns |= {
            "scan_heads": scan.y.dim.count,
            "scan_dim": scan.y.dim.each,
            "scan_state": scan.state,
            "scan_groups": scan.groups.count,
            "scan_chunk": scan.chunk,
            "scan_in": scan.gates * scan.y.dim.count + sum(d.size for d in read if d != scan.groups),
            "scan_shared": sum(d.size for d in read if d == scan.groups),
            "scan_pairs": float(scan.kind in _DELTA),
            "scan_flops": _SCAN_FLOPS[scan.kind] * state,
            "scan_sums": sum(out.dim.size for p in inner if p.into.axis == "tp" for out in p.y),
        }
    return columns


@dataclass
class _SavedElements:
    """Elements per token that a mixer's operators save for its backward pass, each tensor once.

    ssd             the first product's results and its own result; convolution and states run again
                    (state-spaces/mamba e9594ce, ops/triton/ssd_combined.py:888)
    delta           queries and keys of every value head, values, decay in fp32, the write strength, the inverse
                    of each chunk's triangle (fla-org/flash-linear-attention 0315a70, ops/gated_delta_rule/chunk.py)
    others          their inputs"""

    of: Sublayer
    elements: float = 0
    shared: float = 0
    _version: dict[str, int] = field(default_factory=dict)
    _saved: set[tuple[str, int]] = field(default_factory=set)
    _dims: dict[tuple[str, int], Dim] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scan = self.of.first(Scan)
        fused = scan is not None and scan.kind == "ssd"
        for op in self.of.operators:
            match op:
                case Linear():
                    self._save(op.x)
                    for out in op.y:
                        self._write(out.name, out.dim)
                case Norm():
                    self._save(op.x, op.gate)
                    self._write(op.y.name, op.y.dim)
                case Activate():
                    self._save(*op.x)
                    self._write(op.y.name, op.y.dim)
                case Conv():
                    if not fused:
                        self._save(*op.x)
                    for name, dim in zip(op.x, op.channels, strict=True):
                        if not fused:  # else its result is never written
                            self._write(name, dim)
                case Scan():
                    self._recurrence(op)
                    self._write(op.y.name, op.y.dim)
                    if fused:
                        self._save(op.y.name)

    def _recurrence(self, op: Scan) -> None:
        if op.kind in _DELTA:
            heads, values = op.y.dim.count, op.y.dim.each
            self.elements += heads * (2 * op.state + values + op.chunk + 2 * (op.gates - 1) + 1)
        elif op.kind == "ssd":
            self._save(*(out.name for out in products_of(self.of)[0].y))
        else:
            self._save(*op.x)

    def _write(self, name: str, dim: Dim) -> None:
        self._version[name] = self._version.get(name, -1) + 1
        self._dims[name, self._version[name]] = dim

    def _save(self, *names: str) -> None:
        for name in names:
            key = name, self._version.get(name, -1)
            if key in self._dims and key not in self._saved:
                self._saved.add(key)
                if self._dims[key].copies:
                    self.shared += self._dims[key].size
                else:
                    self.elements += self._dims[key].size


def _inner(s: Sublayer) -> dict[str, Any]:
    """Return the columns of an MLP, or of experts."""
    route = s.first(Router)
    if route is None:
        if s.first(Attend) or s.first(Scan) or s.first(Conv):
            return {}
        activate = s.first(Activate)
        if activate is None:
            raise InputError("model.pattern", s.name, "is a sublayer without a price", "price others")
        return {"ffn": activate.y.dim.size, "mlp_matrices": 3 if activate.kind in GATED else 2}
    acts = [op for op in s.operators if isinstance(op, Activate)]
    of_experts = next(op for op in acts if op.y.rows == "received")
    first = next(p for p in products_of(s) if p.experts is not None)
    by_experts = route.chooser == "experts"
    width = route.count if by_experts else route.top_k
    # On average, of what a token chooses, the rest are experts without weights.
    chosen = route.top_k * route.count / (route.count + route.identity) if route.identity else route.top_k
    columns = {
        "mlp_matrices": 3 if of_experts.kind in GATED else 2,
        "experts": route.count,
        "top_k": chosen,
        "expert_ffn": of_experts.y.dim.size,
        "expert_dim": first.into.size,
        "shared_ffn": sum(op.y.dim.size for op in acts if op is not of_experts and op.kind != "sigmoid_gate"),
        "shared_gate": float(any(out.name == "shared.scale" for p in products_of(s) for out in p.y)),
        "capacity": route.capacity or float(by_experts),
        "experts_choose": float(by_experts),
        "router_scores": (route.count + route.identity) * (1.0 + bool(route.balance_loss))
        + width
        + bool(route.z_loss),
        "router_places": 8.0 * route.count if by_experts else 8.0 * 3 * route.top_k,
    }
    depends = by_experts or route.balance_loss or route.capacity is not None
    columns["gathers_choices"] = 4.0 * width if depends else 0.0  # scores in fp32, or places
    return columns


def _parameters(block: Block) -> dict[str, float]:
    """Return the columns that count parameters, by how tp splits them and whether they may be gathered in 8 bits."""
    out = dict.fromkeys(
        (
            *("params", "expert_params", "whole", "kv", "own", "matrices", "expert_matrices"),
            *("others", "expert_others", "others_whole", "others_kv"),
        ),
        0.0,
    )
    for name, w in block.weights():
        size = math.prod(dim.size for dim in w.shape)
        matrix = w.role in ("column", "row", "latent", "expert_column", "expert_row")
        loose = size * (not matrix)
        if w.role.startswith("expert"):
            out["expert_params"] += size
            out["expert_matrices"] += matrix
            out["expert_others"] += loose
            continue
        out["params"] += size
        out["matrices"] += matrix
        out["others"] += loose
        if not any(dim.axis == "tp" for dim in w.shape):
            out["whole"] += size
            out["others_whole"] += loose
            inside = w.role == "norm" and name.count(".") > 1
            out["own"] += size * (inside or w.role.startswith(("latent", "router")))
        elif any(dim.copies for dim in w.shape):
            out["kv"] += size
            out["others_kv"] += loose
    return out


def counted_kinds(blocks: tuple[Block, ...], hidden: int) -> tuple[tuple[BlockKind, ...], tuple[int, ...]]:
    """Return the kinds of a model's blocks, those with experts last, and for each block the index of its kind. Blocks
    that differ only in whether they have a window are one kind."""
    seen: dict[tuple[Block, int | None], list[int]] = {}
    windows = {block: (_unwindowed(block), _window(block)) for block in dict.fromkeys(blocks)}
    sizes: dict[Block, set[int]] = {}
    for bare, window in windows.values():
        if window is not None:
            sizes.setdefault(bare, set()).add(window)
    for i, block in enumerate(blocks):
        bare, window = windows[block]
        same = len(sizes.get(bare, ())) <= 1
        seen.setdefault((bare, None if same else window), []).append(i)
    ordered = sorted(seen.items(), key=lambda item: item[0][0].first(Router) is not None)
    kinds, place = [], [0] * len(blocks)
    for k, ((bare, _), places) in enumerate(ordered):
        having = [w for i in places if (w := windows[blocks[i]][1]) is not None]
        kinds.append(kind_of(bare, len(places), hidden, len(having) / len(places), having[0] if having else 0))
        for i in places:
            place[i] = k
    return tuple(kinds), tuple(place)


def _window(block: Block) -> int | None:
    attend = block.first(Attend)
    return attend.window if attend else None


def _unwindowed(block: Block) -> Block:
    """Return a block whose attention has no window."""
    if _window(block) is None:
        return block
    sublayers = tuple(replace(s, operators=tuple(_open(s))) for s in block.sublayers)
    return replace(block, sublayers=sublayers)


def _open(s: Sublayer) -> Iterator[Any]:
    for op in s.operators:
        yield replace(op, window=None) if isinstance(op, Attend) else op
