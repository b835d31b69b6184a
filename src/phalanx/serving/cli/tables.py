"""`--serving` of `memory`, `comm` and `roofline`: the same tables for decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.planning.tables.table import Sheet


def sheets(
    which: str,
    serving: bool,
    of_training: Sequence[object],
    model: str | None,
    cluster: str | None,
    seq: int | None,
    weights: str | None,
    kv: str | None,
    gpus: int | None,
) -> list[Sheet]:
    """Return the tables of `memory`, `comm` or `roofline` for serving. `of_training`: options that it does not have.

    Raises InputError.
    """
    from phalanx.serving import tables
    from phalanx.serving.cost.layout import ServingLayout
    from phalanx.serving.question import price_of
    from phalanx.spec.errors import InputError

    if not serving:
        option, value = ("--weights", weights) if weights else ("--kv", kv)
        raise InputError(option, value, "is for serving", "add --serving")
    if any(value is not None for value in of_training):
        remedy = "it takes --model, --cluster, --gpus, --seq, --weights and --kv"
        raise InputError("--serving", None, "excludes plans, and options of a training step", remedy)
    if model is None:
        raise InputError("--model", None, "is missing", f"phalanx {which} --serving --model llama3-70b")
    if seq is not None and not 1 <= seq <= 10**8:
        raise InputError("--seq", seq, "must be at least 1")
    price = price_of(model, cluster or "dgx-h100", 16 if gpus is None else gpus, weights or "bf16", kv or "bf16")
    m = price.model
    if (seq or 1) > m.max_seq:
        raise InputError("--seq", seq, f"is longer than the model's context, {m.max_seq:,}")
    length = seq or min(m.max_seq, 4096)
    degrees = [t for t in (1, 2, 4, 8, 16) if t <= (16 if gpus is None else gpus) and m.heads % t == 0]
    if which == "roofline":
        return [tables.intensity(price, length)]
    if which == "comm":
        pairs = [
            tables.collectives(price, degrees[1:]),
            tables.tensor_pays(price, length, degrees),
            tables.tensor_or_pipeline(price, length, degrees),
        ]
        return pairs if degrees[1:] else pairs[2:]
    layouts = [ServingLayout(t, 1, 1, t, 1) for t in degrees]
    layouts += [ServingLayout(1, p) for p in degrees[1:] if p <= m.layers]
    if m.experts is not None:
        layouts += [ServingLayout(1, 1, t, 1, t) for t in degrees[1:] if m.experts.count % t == 0]
    return [tables.cache(m, length), tables.room(price, length, layouts)]
