"""`phalanx serve memory`, `comm` and `roofline`: tables of decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from phalanx.cli.command import command
from phalanx.cli.output import Display

if TYPE_CHECKING:
    from phalanx.serving.cost.roofline import ServingPrice

OPTIONS = """
--weights bf16|fp8|int4|nvfp4: Type of the weights.
--kv bf16|fp8: Type of the KV cache.
"""


Shown = Annotated[Display, "json", "save"]


@command
def memory(
    model: str,
    output: Shown,
    cluster: str = "dgx-h100",
    gpus: int = 16,
    seq: int | None = None,
    weights: str = "bf16",
    kv: str = "bf16",
) -> None:
    """Tabulate the KV cache of a model, and the requests that fit under each layout."""
    from phalanx.answers.tables import Tables
    from phalanx.serving import tables
    from phalanx.serving.cost.layout import ServingLayout

    price, length, degrees = _priced(model, cluster, gpus, seq, weights, kv)
    m = price.model
    layouts = [ServingLayout(t, 1, 1, t, 1) for t in degrees]
    layouts += [ServingLayout(1, p) for p in degrees[1:] if p <= m.layers]
    if m.experts is not None:
        layouts += [ServingLayout(1, 1, t, 1, t) for t in degrees[1:] if m.experts.count % t == 0]
    output.show(Tables(None, (tables.cache(m, length), tables.room(price, length, layouts))), subject="memory")


@command
def comm(
    model: str,
    output: Shown,
    cluster: str = "dgx-h100",
    gpus: int = 16,
    seq: int | None = None,
    weights: str = "bf16",
    kv: str = "bf16",
) -> None:
    """Tabulate what tensor parallelism sends per step of decoding, and when it or a pipeline pays."""
    from phalanx.answers.tables import Tables
    from phalanx.serving import tables

    price, length, degrees = _priced(model, cluster, gpus, seq, weights, kv)
    sheets = [tables.tensor_or_pipeline(price, length, degrees)]
    if degrees[1:]:
        sheets = [tables.collectives(price, degrees[1:]), tables.tensor_pays(price, length, degrees), *sheets]
    output.show(Tables(None, tuple(sheets)), subject="comm")


@command
def roofline(
    model: str,
    output: Shown,
    cluster: str = "dgx-h100",
    gpus: int = 16,
    seq: int | None = None,
    weights: str = "bf16",
    kv: str = "bf16",
) -> None:
    """Tabulate the intensity of decoding by batch, and whether memory or computing bounds it."""
    from phalanx.answers.tables import Tables
    from phalanx.serving import tables

    price, length, _ = _priced(model, cluster, gpus, seq, weights, kv)
    output.show(Tables(None, (tables.intensity(price, length),)), subject="roofline")


def _priced(
    model: str, cluster: str, gpus: int, seq: int | None, weights: str, kv: str
) -> tuple[ServingPrice, int, list[int]]:
    """Return the price of decoding, the length of its context, and the degrees of parallelism to tabulate.

    Raises InputError."""
    from phalanx.serving.question import price_of
    from phalanx.spec.errors import InputError

    if seq is not None and not 1 <= seq <= 10**8:
        raise InputError("seq", seq, "must be at least 1")
    price = price_of(model, cluster, gpus, weights, kv)
    m = price.model
    if (seq or 1) > m.max_seq:
        raise InputError("seq", seq, f"is longer than the model's context, {m.max_seq:,}")
    degrees = [t for t in (1, 2, 4, 8, 16) if t <= gpus and m.heads % t == 0]
    return price, seq or min(m.max_seq, 4096), degrees
