"""The textbook's tables of memory and traffic, for a model or only a number of parameters.

State per parameter in mixed precision with Adam (Rajbhandari et al. 2020): weight 2, gradient 2, master copy and two
moments 12 bytes: 16 in all; 18 if gradients are kept in fp32, 20 if in both types, 12 without the master copy. Over P
ranks

    ZeRO-0  16        ZeRO-1  4 + 12/P        ZeRO-2  2 + 14/P        ZeRO-3  16/P

Activations of a block (Korthikanti et al. 2022, table 2), in bytes:

    none                s b h (10 + 24/t + 5 a s / (h t))      divided by t as a whole with sequence parallelism
    selective           s b h (10 + 24/t), 34/t with sp        full  2 s b h
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.cost.ledger.kind import BlockKind
from phalanx.cost.ledger.live_bytes import Keeps, live_bytes
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.rank_layout import layout
from phalanx.planning.budget import large_number
from phalanx.planning.explain.explanation import MEANING, regime
from phalanx.planning.tables.table import Sheet, columns
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS


@dataclass(frozen=True)
class BytesPolicy:
    """Bytes per parameter, by kind, in mixed precision with Adam."""

    weight: int
    gradient: int
    master: int
    moments: int
    what: str

    @property
    def kinds(self) -> tuple[int, int, int]:
        """(weight, gradient, optimizer's state), which ZeRO-3, 2 and 1 shard."""
        return (self.weight, self.gradient, self.master + self.moments)


POLICIES = {
    12: BytesPolicy(2, 2, 0, 8, "no master copy: an update below 1/512 of a bf16 weight is lost"),
    16: BytesPolicy(2, 2, 4, 8, "master copy in fp32, gradients in the sent type"),
    18: BytesPolicy(2, 4, 4, 8, "gradients kept and added in fp32"),
    20: BytesPolicy(2, 6, 4, 8, "gradients in both types"),
}
"""Policies by the sum of their bytes."""


def kinds(params: float, policy: int) -> Sheet:
    """Tabulate the bytes per parameter by kind for every policy, and the total of `policy` for `params`
    parameters."""
    rows = [
        (total, p.weight, p.gradient, p.master, p.moments, total * params / 1e9, p.what)
        for total, p in POLICIES.items()
    ]
    return Sheet(
        f"bytes of a parameter by kind; {policy} are taken above",
        columns(
            "bytes | weight [count] | gradient [count] | master [count] | two moments [count] | in all [GB] | policy"
        ),
        rows,
        "bf16 weights, Adam's moments in fp32 (Rajbhandari et al. 2020). In fp32 alone: 4 + 4 + 0 + 8, also 16",
        stacked=("weight", "gradient", "master", "two moments"),
        stacked_unit="bytes a parameter",
        charted=False,
    )


def savings(ranks: Sequence[int], policy: int) -> Sheet:
    """Tabulate the factor by which each level of ZeRO reduces a rank's state."""
    rows = []
    for p in ranks:
        whole = zero_bytes(1.0, 0, p, policy)
        rows.append((p, *(whole / zero_bytes(1.0, zero, p, policy) for zero in (1, 2, 3))))
    weight, gradient, _ = POLICIES[policy].kinds
    limits = f"{policy / (weight + gradient):.3g}, {policy / weight:.3g} and P"
    return Sheet(
        f"how many times less state a rank has, {policy} bytes a parameter",
        columns("P | ZeRO-1 [count] | ZeRO-2 [count] | ZeRO-3 [count]"),
        rows,
        f"{limits} are limits for many ranks, which the first two never reach",
        charted=False,
    )


def parse_count(text: str, field: str = "params") -> float:
    """Parse a number of parameters or tokens: `25M`, `7B`, `1.5T`, `2e12`. Raises InputError."""
    number = large_number(text)
    if number is None:
        what = "tokens" if field == "tokens" else "parameters"
        raise InputError(field, text, f"is not a number of {what}", "write 25M, 7B, 1.5T or 2e12")
    return number


def zero_bytes(params: float, zero: int, ranks: int, policy: int = 16) -> float:
    """Return the bytes of model state on a rank at a level of ZeRO. Raises InputError for an unknown policy."""
    if policy not in POLICIES:
        raise InputError("bytes_per_parameter", policy, "is not known", "use 12, 16, 18 or 20")
    weight, gradient, rest = POLICIES[policy].kinds
    kept: float = ZERO_LEVELS[zero].bytes_kept(rest, gradient, weight, ranks)
    return params * kept


def state(params: float, ranks: Sequence[int], policy: int, card_bytes: float) -> Sheet:
    """Tabulate the model state per rank, by number of ranks and level of ZeRO."""
    rows = []
    for p in ranks:
        sizes = [zero_bytes(params, zero, p, policy) / 1e9 for zero in range(4)]
        first = next((f"ZeRO-{zero}" for zero, size in enumerate(sizes) if size * 1e9 <= card_bytes), "none")
        rows.append((p, *sizes, first))
    total = policy * params
    return Sheet(
        f"state of {params:,.0f} parameters, {policy} bytes each, on each of P ranks",
        columns("P", *(f"ZeRO-{zero} [GB]" for zero in range(4)), "first that fits"),
        rows,
        f"GB = 1e9 bytes; fits: state alone within {card_bytes / 1e9:.0f} GB; activations come on top. "
        f"Cards that hold weights of 2 bytes, {2 * params / 1e9:g} GB: {cards(2 * params, card_bytes)}; "
        f"state, {total / 1e9:g} GB: {cards(total, card_bytes)}",
    )


def cards(held: float, card_bytes: float) -> int:
    """Return the number of cards that hold `held` bytes, spread evenly."""
    return math.ceil(held / card_bytes)


def activation_bytes(
    model: ModelSpec, micro_batch: int, seq: int, tp: int = 1, sp: bool = False, recompute: str = "none"
) -> float:
    """Return the activation bytes of all blocks for one micro-batch on a rank, as the ledger counts them.

    As in the paper: an MLP 4 h wide without a gate, as many key heads as heads, masks of dropout, no flash
    attention."""
    h = model.hidden
    sizes = shape(model)
    heads = {"heads": model.heads, "kv_heads": model.heads, "kv_width": 2 * h / model.heads}
    heads |= dict.fromkeys(("head_dim", "value_dim", "core_dim"), h / model.heads)
    block = BlockKind("as in the paper", model.layers, h, rms=sizes.rms, ffn=4 * h, **heads)
    sizes = replace(sizes, kinds=(block,))
    s = Strategy(tp=tp, sp=sp, micro_batch=micro_batch, recompute=recompute)
    how = layout(s, Job(micro_batch, seq, Precision("bfloat16")), model.layers)
    return float(live_bytes(sizes, how, Keeps(flash=0.0)).stored) * model.layers


def activations(model: ModelSpec, micro_batch: int, seq: int, degrees: Sequence[int]) -> Sheet:
    """Tabulate activations by tensor parallelism and recomputation."""
    rows = []
    for tp, sp in [(1, False)] + [(t, sp) for t in degrees if t > 1 for sp in (False, True)]:
        sizes = [
            activation_bytes(model, micro_batch, seq, tp, sp, kind) / 1e9 for kind in ("none", "selective", "full")
        ]
        rows.append((tp, "yes" if sp else "no", *sizes))
    return Sheet(
        f"activations of {model.layers} blocks, {micro_batch} x {seq} tokens, on each tp rank",
        columns("tp | sp | none [GB] | selective [GB] | full [GB]"),
        rows,
        "Korthikanti et al. 2022, table 2: without embeddings, logits, loss; flash attention has what selective has",
    )


_GRADIENT = 2
"""Bytes of a gradient: bf16 or fp16."""


def gradient_traffic(params: float, ranks: Sequence[int], rate: float) -> Sheet:
    """Tabulate the traffic of data parallelism in a step, from only a parameter count."""
    rows = []
    for p in ranks:
        n = params * _GRADIENT
        ring = 2 * n * (p - 1) / p
        rows.append((p, n / 1e9, ring / 1e9, ring / rate, p * ring / 1e12, 1.5 * ring / 1e9, 1.5 * ring / rate))
    return Sheet(
        f"gradients of {params:,.0f} parameters in {_GRADIENT} bytes, over P ranks of {rate / 1e9:g} GB/s",
        columns(
            "P | payload [GB] | all-reduce sent [GB] | takes [s] | all ranks, TB [count] | ZeRO-3 sent [GB] "
            "| ZeRO-3 takes [s]"
        ),
        rows,
        "by a rank over its link in one direction: 2 (P-1)/P payloads; ZeRO-3: two all-gathers and a reduce-scatter",
    )


def step_share(params: float, ranks: Sequence[int], rate: float, seconds: float) -> Sheet:
    """Tabulate the all-reduce of gradients against a step that computes for `seconds`, without and with overlap."""
    rows = []
    for p in ranks:
        takes = 2 * params * _GRADIENT * (p - 1) / p / rate
        step, hidden = seconds + takes, max(seconds, takes)
        rows.append((p, takes, takes / seconds, takes / step, step, hidden, step / hidden))
    return Sheet(
        f"the all-reduce and {seconds:g} s of computing",
        columns(
            "P | takes [s] | of the computing [share] | of the step [share] | step in a row [s] "
            "| fully overlapped [s] | times as fast [count]"
        ),
        rows,
        "texts call either of the two shares the overhead",
        charted=False,
    )


PLACE_BYTES = 8
"""Bytes of an index from torch.topk (int64), for `top_k`; our own compressor sends 4."""


def top_k(params: float, ranks: Sequence[int], share: float) -> Sheet:
    """Tabulate the savings of sending only the largest `share` of gradients. Ranks choose different ones, so values
    and indices travel by all-gather: a rank sends its own to each of the others."""
    rows = []
    for p in ranks:
        gathered = (p - 1) * share * params * (4 + PLACE_BYTES)
        ring = 2 * 4 * params * (p - 1) / p
        times = None if p == 1 else ring / gathered
        rows.append((p, ring / 1e9, gathered / 1e9, times, None if times is None else times / 2))
    return Sheet(
        f"the largest {share:.3g} of {params:,.0f} gradients instead of all",
        columns(
            "P | ring in fp32 [GB] | values and places [GB] | times less [count] | times less than in 16 bits [count]"
        ),
        rows,
        f"sent by a rank; a value takes 4 bytes, its place {PLACE_BYTES}; below 1 it sends more than a ring. "
        f"The buffer alone is {4 / share / (4 + PLACE_BYTES):.3g} times smaller",
        charted=False,
    )


def intensity(params: float, seq: int, batches: Sequence[int], peak: float, rate: float, link: str) -> Sheet:
    """Tabulate data parallelism on the communication roofline: a rank's FLOP per byte that it sends, by batch per
    rank. `peak`: FLOP/s; `rate`: bytes/s of `link`."""
    rows: list[tuple[object, ...]] = []
    ridge = peak / rate
    for b in batches:
        ratio = 6 * params * b * seq / (2 * params * 2)
        rows.append((b, ratio, ridge, ratio / ridge, regime(ratio / ridge), min(1.0, ratio / ridge)))
    return Sheet(
        f"{params:,.0f} parameters, sequences of {seq:,} on each rank, over {link} of {rate / 1e9:g} GB/s",
        columns("batch per rank | FLOP/byte [count] | ridge [count] | ratio [count] | regime | efficiency [share]"),
        rows,
        "6 N FLOP a token over 2 N gradients of 2 bytes each, as a ring of many ranks sends them; efficiency: if "
        "compute and communication overlap perfectly, so that the longer of the two is the step; critical batch "
        f"{ridge / (1.5 * seq):.3f} sequences; 90 % from {0.9 * ridge / 1.5:,.0f} tokens on each rank; {MEANING}",
    )


def training(params: float, tokens: float, rate: float, gpus: Sequence[int]) -> Sheet:
    """Tabulate the time of training on `tokens` tokens if each GPU reaches `rate` FLOP/s."""
    flops = 6 * params * tokens
    rows = [(n, flops / rate / n / _DAY / 365, flops / rate / n / _DAY, flops / rate / 3600) for n in gpus]
    return Sheet(
        f"{params:,.0f} parameters, {tokens:,.0f} tokens: {flops:.3g} FLOP at {rate / 1e12:g} TFLOP/s each",
        columns("GPUs | years [count] | days [count] | GPU-hours [count]"),
        rows,
        "6 N FLOP a token, years of 365 days; all GPUs at the same rate, however many they are",
    )


_DAY = 86_400
FOLLOWS = (
    "from a number of parameters follow: state by level of ZeRO, gradient traffic, 6 N FLOP per token; "
    "activations, tensor-parallel and pipeline traffic do not: they need hidden, layers and heads of a model"
)
