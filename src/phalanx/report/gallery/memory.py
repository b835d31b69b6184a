"""Pictures of memory: the bytes of a parameter, what ZeRO leaves of them, the memory wall, activations."""

import math

import numpy as np

from phalanx.planning.lookup import model_named, require_counts
from phalanx.planning.tables import textbook
from phalanx.report.pictures.figure import Bar, Bars, Lines, Mark, Picture, PlotAxis, RuleLine, Series
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS

_KINDS = ("weights", "gradients", "master copy", "two moments")
_SOURCE = "`phalanx tables memory`: bf16 weights, Adam's moments in fp32 (Rajbhandari et al. 2020)"


def parameter_bytes(params: str = "7B", ranks: int = 8, policy: int = 16) -> Picture:
    """Draw the bytes of a parameter by policy, and those on a rank at each level of ZeRO. `policy`: their sum."""
    require_counts(("ranks", ranks))
    count = textbook.parse_count(params)
    policies = [
        Bar(
            str(total),
            tuple(zip(_KINDS, map(float, (p.weight, p.gradient, p.master, p.moments)), strict=True)),
            f"{total * count / 1e9:,.4g} GB",
        )
        for total, p in textbook.POLICIES.items()
    ]
    levels = []
    chosen = textbook.POLICIES[policy] if policy in textbook.POLICIES else textbook.POLICIES[16]
    whole = textbook.zero_bytes(1.0, 0, ranks, policy)
    for zero, level in enumerate(ZERO_LEVELS):
        left = textbook.zero_bytes(1.0, zero, ranks, policy)
        parts = [
            float(chosen.weight) / (ranks if level.parameters else 1),
            float(chosen.gradient) / (ranks if level.gradients else 1),
            float(chosen.master) / (ranks if level.state else 1),
            float(chosen.moments) / (ranks if level.state else 1),
        ]
        assert math.isclose(sum(parts), left)
        text = f"{left:.4g} B, {left * count / 1e9:,.4g} GB, 1/{whole / left:.3g}"
        levels.append(Bar(f"ZeRO-{zero}", tuple(zip(_KINDS, parts, strict=True)), text))
    by_policy = f"By policy, and for {count / 1e9:g} B parameters in all"
    return Picture(
        f"The {policy} bytes of a parameter, and what each level of ZeRO leaves on one of {ranks} ranks",
        (
            Bars("bytes a parameter", tuple(policies), head=by_policy),
            Bars("bytes a parameter on each rank", tuple(levels), head=f"{policy} bytes over {ranks} ranks"),
        ),
        _SOURCE,
        " ".join(f"{total}: {textbook.POLICIES[total].what}." for total in (12, 18, 20)),
    )


_STATE = "state, without activations"
_CARDS = (("A100 40 GB", "A100-40GB"), ("H100 80 GB", "H100"), ("B200 180 GB", "B200"))


def memory_wall(ranks: int = 64) -> Picture:
    """Draw the memory of a model's state over its parameters, with lines for cards."""
    require_counts(("ranks", ranks))
    sizes = np.geomspace(1e8, 2e12, 30).tolist()
    curves = (
        ("weights alone, 2 bytes", 2.0),
        ("state, 16 bytes (DDP)", textbook.zero_bytes(1.0, 0, ranks)),
        (f"ZeRO-1 over {ranks}", textbook.zero_bytes(1.0, 1, ranks)),
        (f"ZeRO-3 over {ranks}", textbook.zero_bytes(1.0, 3, ranks)),
    )
    cards = [(name, float(CHIPS[chip].memory_bytes)) for name, chip in _CARDS]
    series = tuple(Series(name, [(n, n * each) for n in sizes]) for name, each in curves)
    largest = max(size for _, size in cards)
    a100, h100 = (size for _, size in cards[:2])
    state = curves[1][1]
    marks = tuple(Mark(h100 / each, h100, f"{h100 / each / 1e9:.3g} B", i) for i, (_, each) in enumerate(curves))
    marks += (Mark(a100 / state, a100, f"{a100 / state / 1e9:.3g} B", 1),)
    panel = Lines(
        PlotAxis("parameters", "parameters", log=True, low=1e8, high=max(2e12, 2 * max(m.x for m in marks))),
        PlotAxis(f"memory of one GPU for {_STATE}", "bytes", log=True, base=2**5, low=2.0**28, high=2.0**44),
        series,
        marks,
        tuple(RuleLine("y", size, f"{name}: {size / GIB:.0f} GiB") for name, size in cards),
        height=400,
    )
    return Picture(
        "The memory wall: what a model's state needs, and what a card holds",
        (panel,),
        f"{_SOURCE}; memory of cards as their driver reports it",
        f"Dots: the largest model whose state alone fits a card. A driver reports more than the card's name says: "
        f"{h100 / 1e9:.1f} GB of an H100. In 80 GB, 16 bytes each are {80 / state:.3g} B parameters, in 40 GB "
        f"{40 / state:.3g} B. The largest card here holds {largest / GIB:.0f} GiB.",
    )


def activations(model: str = "gpt3-175b", seq: int | None = None, micro_batch: int = 1) -> Picture:
    """Draw activations of all blocks over tp, sp and recomputation."""
    spec, _ = model_named(model)
    return activations_of(spec, model, micro_batch, seq or min(spec.max_seq, 8192))


def activations_of(spec: ModelSpec, name: str, micro_batch: int, seq: int) -> Picture:
    """Draw activations of a model's blocks over tp, sp and recomputation."""
    require_counts(("seq", seq), ("micro_batch", micro_batch))
    degrees = [t for t in (1, 2, 4, 8) if spec.heads % t == 0]
    panels = []
    largest = textbook.activation_bytes(spec, micro_batch, seq, 1, False, "none") / 1e9
    for kind, what in (
        ("none", "no recomputation"),
        ("selective", "selective recomputation, or flash attention"),
        ("full", "full recomputation"),
    ):
        bars = []
        for tp, sp in [(1, False)] + [(t, sp) for t in degrees if t > 1 for sp in (False, True)]:
            size = textbook.activation_bytes(spec, micro_batch, seq, tp, sp, kind) / 1e9
            bars.append(Bar(f"tp={tp}" + (", sp" if sp else ""), (("", size),), f"{size:,.4g} GB"))
        panels.append(Bars("GB on each tp rank", tuple(bars), head=what, end=largest))
    return Picture(
        f"Activations of {name}: {spec.layers} blocks, {micro_batch} x {seq:,} tokens",
        tuple(panels),
        "`phalanx tables memory --model`: Korthikanti et al. 2022, table 2; without embeddings, logits and loss",
        "One scale in all panels. sp divides what tp alone leaves whole: norms and the residual stream.",
    )
