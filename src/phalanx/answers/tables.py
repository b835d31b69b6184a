"""Tables of a strategy, or of a number of parameters without a model: memory, traffic, rooflines, scaling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from phalanx.answers.answer import DRAWN, Answer, plain
from phalanx.answers.prediction import prediction_of
from phalanx.answers.question.query import QueryFields, Source, query_of
from phalanx.answers.question.question import Premises
from phalanx.answers.question.resolution import read
from phalanx.cost.analytic.chips import system_of
from phalanx.planning import lookup
from phalanx.planning.search import HEADROOM
from phalanx.planning.tables import scaling as scalings
from phalanx.planning.tables import textbook
from phalanx.planning.tables.communication import exact_sheet, overlap_sheet
from phalanx.planning.tables.communication import sheet as traffic_sheet
from phalanx.planning.tables.roofline import ridges, rooflines
from phalanx.planning.tables.table import Sheet, columns
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy


def memory_sheet(s: Strategy, terms: Mapping[str, float], needed: float, usable: int, state: str) -> Sheet:
    """Tabulate bytes by term. `needed`: bytes reserved; `usable`: usable bytes of the device; `state`: words for the
    state of a parameter."""
    rows = [(name, value, value / usable) for name, value in terms.items() if value]
    rest = needed - sum(terms.values())
    rows += [("reserved beyond the peak", rest, rest / usable)] if rest > 1 else []
    rows.append(("in all", needed, needed / usable))
    fits = "fits tightly" if 0.95 * usable < needed <= usable else "fits" if needed <= usable else "does not fit"
    title = f"memory of {s}: {fits}, {needed / 2**30:.1f} of {usable / 2**30:.1f} GiB usable"
    names = columns("what | takes [bytes] | of the device [share]")
    return Sheet(title, names, rows, f"of the fullest rank; {state}")


RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Ranks of a table's rows."""
_MOST_GPUS = 10**9
_BATCHES = (1, 4, 16, 32, 64, 256)
_DEVICES = {"v100": "dgx-2", "a100": "dgx-a100", "h100": "dgx-h100", "h200": "dgx-h200", "b200": "dgx-b200"}


@dataclass(frozen=True)
class Tables(Answer):
    """Tables of raw numbers, with units in their columns."""

    question: Premises | None
    """None for tables of a number of parameters."""
    tables: tuple[Sheet, ...]
    notes: tuple[str, ...] = ()
    subject: tuple[Any, ...] = field(default=(), repr=False, compare=False, metadata=DRAWN)
    """The picture where it is not of the columns: its kind in report/tables.py, and its arguments."""

    def records(self) -> list[dict[str, Any]]:
        """Return the rows of the first table."""
        return self.tables[0].records()

    def __getitem__(self, place: int) -> Sheet:
        return self.tables[place]

    def __len__(self) -> int:
        return len(self.tables)


@plain.register
def _(value: Sheet) -> dict[str, Any]:
    return {"title": value.title, "rows": plain(value.records()), "note": value.note}


def memory(source: Source = None, **fields: Unpack[QueryFields]) -> Tables:
    """Tabulate what occupies the memory of a strategy's fullest rank. Raises InputError."""
    q = read(query_of(source, fields))
    p = prediction_of(q)
    sheet = memory_sheet(p.strategy, p.memory_terms, p.memory_bytes, int(p.usable_bytes), p.state.line)
    return Tables(q.premises, (sheet,), q.notes)


def state_memory(params: str | float, bytes_per_parameter: int = 16, card_gb: float = 80.0) -> Tables:
    """Tabulate the state of a number of parameters (7e9, "7B") by level of ZeRO, the bytes of a parameter by kind,
    and what ZeRO saves. Raises InputError."""
    count = textbook.parse_count(str(params))
    sheets = _state(count, bytes_per_parameter, card_gb)
    return Tables(None, sheets, (textbook.FOLLOWS,), ("state", count, bytes_per_parameter))


def model_memory(
    model: str | ModelSpec,
    micro_batch: int = 1,
    seq: int | None = None,
    bytes_per_parameter: int = 16,
    card_gb: float = 80.0,
) -> Tables:
    """Tabulate a model's state as `state_memory` does, and its activations by recomputation, tp and sp. Raises
    InputError."""
    require_positive(card=card_gb, micro_batch=micro_batch, seq=seq)
    spec = model if isinstance(model, ModelSpec) else lookup.model_named(model)[0]
    count, length = float(spec.parameter_count), seq or spec.max_seq
    state, *others = _state(count, bytes_per_parameter, card_gb)
    degrees = [t for t in (1, 2, 4, 8, 16) if spec.heads % t == 0]
    activations = textbook.activations(spec, micro_batch, length, degrees)
    subject = ("model", count, bytes_per_parameter, spec, str(model), micro_batch, length)
    return Tables(None, (state, activations, *others), (), subject)


def _state(count: float, bytes_per_parameter: int, card_gb: float) -> tuple[Sheet, ...]:
    require_positive(card=card_gb)
    return (
        textbook.state(count, RANKS, bytes_per_parameter, card_gb * 1e9),
        textbook.kinds(count, bytes_per_parameter),
        textbook.savings(RANKS, bytes_per_parameter),
    )


def traffic(source: Source = None, **fields: Unpack[QueryFields]) -> Tables:
    """Tabulate the bytes that each mesh axis of a strategy sends in a step. Raises InputError."""
    q = read(query_of(source, fields))
    if q.exact is not None:
        return Tables(q.premises, (exact_sheet(q.exact),), q.notes)
    return Tables(q.premises, (traffic_sheet(q.subject), overlap_sheet(q.subject)), q.notes)


def gradient_traffic(
    params: str | float, rate_gb_s: float = 25.0, compute_s: float | None = None, top_k: float | None = None
) -> Tables:
    """Tabulate the bytes that an all-reduce of the gradients of `params` parameters sends, by number of ranks.

    `rate_gb_s`: bandwidth of a rank in one direction; `compute_s`: seconds of computing that the step has too;
    `top_k`: the share of gradients that is sent, if not all. Raises InputError."""
    require_positive(rate=rate_gb_s, compute=compute_s, top_k=top_k)
    if top_k is not None and top_k > 1:
        raise InputError("top_k", top_k, "is more than all", "use a share such as 0.01")
    count, rate = textbook.parse_count(str(params)), rate_gb_s * 1e9
    sheets = [textbook.gradient_traffic(count, RANKS, rate)]
    sheets += [] if compute_s is None else [textbook.step_share(count, RANKS, rate, compute_s)]
    sheets += [] if top_k is None else [textbook.top_k(count, RANKS, top_k)]
    return Tables(None, tuple(sheets), (textbook.FOLLOWS,))


def roofline(source: Source = None, **fields: Unpack[QueryFields]) -> Tables:
    """Tabulate ridge points of the known systems and the intensity of each operator of a strategy, in training and in
    decoding. Raises InputError."""
    q = read(query_of(source, fields))
    assert q.strategy is not None
    sheets = (ridges(), *rooflines(q.pricing, q.strategy))
    return Tables(q.premises, sheets, q.notes, ("roofline", q.pricing, q.strategy))


def ridge_points() -> Tables:
    """Tabulate the FLOP per byte at which memory and links keep up with each known chip."""
    return Tables(None, (ridges(),), (), ("chips",))


def communication_intensity(params: str | float, cluster: str = "dgx-h100", seq: int = 2048) -> Tables:
    """Tabulate the FLOP per byte sent by batch size, for `params` parameters, over the links inside a node and those
    between nodes. Raises InputError."""
    require_positive(seq=seq)
    count, node = textbook.parse_count(str(params)), lookup.cluster_named(cluster)(1)
    pair = lookup.cluster_named(cluster)(2 * node.ranks_per_node)
    peak = float(system_of(pair).peak_bf16)
    rates = {t.name: t.bandwidth_bytes_per_s_per_gpu_per_direction for t in (pair.tiers[0], pair.tiers[-1])}
    sheets = tuple(textbook.intensity(count, seq, _BATCHES, peak, rates[name], name) for name in rates)
    return Tables(None, sheets, (), ("links", cluster))


def scaling(
    model: str | ModelSpec,
    cluster: str | ClusterSpec,
    gpus: int | str | Sequence[int],
    batch: int,
    seq: int,
    stack: str = "megatron-core",
    devices: str | None = None,
) -> Tables:
    """Tabulate strong and weak scaling, efficiency by batch size, and the effect of the network.

    `gpus`: several numbers ("64,128,256"), or one, to which four halvings are added; `devices`: chips to compare on
    the largest number of GPUs, such as "a100,h100". Raises InputError."""
    counts = _counts(gpus)
    spec = model if isinstance(model, ModelSpec) else lookup.model_named(model)[0]

    def on(name: str | ClusterSpec) -> scalings.Question:
        return lookup.pricing_by_gpus(spec, lookup.cluster_on(name), batch, seq, stack, HEADROOM)

    question, most = on(cluster), counts[-1]
    batches = [batch * 2**k // 8 for k in range(7) if batch * 2**k % 8 == 0]
    sheets = [
        *(scalings.by_gpus(question, counts, weak) for weak in (False, True)),
        scalings.by_batch(question, most, batches),
        scalings.sensitivity(question, most),
    ]
    if devices:
        names = [name.strip() for name in devices.split(",")]
        for name in names:
            if name not in _DEVICES:
                raise InputError("devices", name, "is not a device here", nearest(name, _DEVICES))
        sheets.append(scalings.by_device([(_DEVICES[name], on(_DEVICES[name])) for name in names], most))
    title = f"{model} on {cluster}, {batch:,} x {seq:,} tokens"
    return Tables(None, tuple(sheets), (), ("scaling", title))


def training_days(
    params: str | float, tokens: str | float, tflops: float = 150.0, gpus: int | str | Sequence[int] = (1, 1024)
) -> Tables:
    """Tabulate the days of a training by number of GPUs, by the rule of 6 N FLOP a token.

    `tflops`: TFLOP/s that each GPU achieves. Raises InputError."""
    if not 1e-6 <= tflops <= 1e6:
        raise InputError("tflops", tflops, "must be from 1e-6 to 1,000,000 (a GPU reaches some hundreds)")
    count = textbook.parse_count(str(params))
    sheet = textbook.training(count, textbook.parse_count(str(tokens), "tokens"), tflops * 1e12, _counts(gpus))
    return Tables(None, (sheet,))


def _counts(gpus: int | str | Sequence[int]) -> list[int]:
    """Parse numbers of GPUs, ascending; to a single one, four halvings are added. Raises InputError."""
    try:
        counts = [int(part) for part in gpus.split(",")] if isinstance(gpus, str) else gpus
    except ValueError:
        raise InputError("gpus", gpus, "is not a list of numbers", "write 1024, or 64,128,256") from None
    counts = [counts] if isinstance(counts, int) else list(counts)
    if not counts or not 1 <= min(counts) <= max(counts) <= _MOST_GPUS:
        raise InputError("gpus", gpus, f"must be from 1 to {_MOST_GPUS:,}")
    if len(counts) > 1 or not isinstance(gpus, int | str):
        return sorted(counts)
    return sorted({max(1, counts[0] // 2**k) for k in range(5)})


def require_positive(**numbers: float | None) -> None:
    """Require that numbers which were given are positive and finite. Raises InputError."""
    for name, value in numbers.items():
        if value is not None and not 0 < value < float("inf"):
            raise InputError(name, value, "must be positive")
