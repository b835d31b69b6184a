"""`phalanx scaling`: step time and days by number of GPUs, batch and device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.options import (
    Batch,
    Cluster,
    Csv,
    Json,
    Model,
    Params,
    Plot,
    Seq,
    Stack,
)
from phalanx.cli.tables import print_sheets
from phalanx.cli.terminal import exit_on_error, require_drawing
from phalanx.cli.unread import require_only

if TYPE_CHECKING:
    from phalanx.planning.tables.table import Sheet
    from phalanx.report.pictures.figure import Picture


def scaling(
    line: typer.Context,
    model: Model = None,
    cluster: Cluster = "dgx-h100",
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus", metavar="8,16,...|N", help="Numbers of GPUs to compare; N alone stands for doublings up to N."
        ),
    ] = "",
    batch: Batch = None,
    seq: Seq = None,
    params: Params = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="300B", help="Tokens to train on, with --params.")
    ] = None,
    rate: Annotated[float, typer.Option("--tflops", help="TFLOP/s that each GPU reaches, with --params.")] = 150.0,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="v100,a100,h100", help="Also compare these devices, on the largest number of GPUs."
        ),
    ] = None,
    profile: Stack = "megatron-core",
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Tabulate strong and weak scaling, efficiency by batch size, and the effect of the network and the device."""
    with exit_on_error():
        require_drawing(plot)
        from phalanx.planning import question
        from phalanx.planning.search import HEADROOM
        from phalanx.planning.tables import scaling as tables
        from phalanx.spec.errors import InputError, nearest

        if params is not None:
            reason = "is not in the rule of 6 N FLOP a token"
            require_only(line, "params", "tokens", "rate", "gpus", reason=reason, remedy="leave it out, or --params")
            print_sheets([_training(params, tokens, rate, gpus)], as_json, as_csv, plot, of="scaling")
            return
        for name, value in (("--model", model), ("--gpus", gpus), ("--batch", batch), ("--seq", seq)):
            if not value:
                raise InputError(name, None, "is missing", "scaling needs --model, --gpus, --batch and --seq")
        shape = ("model", "cluster", "gpus", "batch", "seq", "devices", "profile")
        require_only(line, *shape, reason="goes with --params alone")
        counts = _counts(gpus)
        spec, _ = question.model_named(str(model))

        def on(name: str) -> tables.Question:
            return question.pricing_by_gpus(
                spec, question.cluster_named(name), batch or 0, seq or 0, profile, HEADROOM
            )

        asked, most = on(str(cluster)), counts[-1]
        sheets = [tables.by_gpus(asked, counts, weak) for weak in (False, True)]
        here = int(batch or 0)
        batches = [here * 2**k // 8 for k in range(7) if here * 2**k % 8 == 0]
        sheets += [tables.by_batch(asked, most, batches), tables.sensitivity(asked, most)]
        if devices:
            short = {"v100": "dgx-2", "a100": "dgx-a100", "h100": "dgx-h100", "h200": "dgx-h200", "b200": "dgx-b200"}
            named = [name.strip() for name in devices.split(",")]
            for name in named:
                if name not in short:
                    raise InputError("--devices", name, "is not a device here", nearest(name, short))
            sheets.append(tables.by_device([(short[name], on(short[name])) for name in named], most))

        def pictures() -> list[Picture]:
            from phalanx.report.gallery.scaling import scaling_of

            return [scaling_of(sheets[:3], f"{model} on {cluster}, {batch or 0:,} x {seq or 0:,} tokens")]

        print_sheets(sheets, as_json, as_csv, plot, of="scaling", pictures=pictures)


def _training(params: str, tokens: str | None, tflops: float, gpus: str) -> Sheet:
    """Return the days of a training by number of GPUs. Raises InputError."""
    from phalanx.planning.tables import textbook
    from phalanx.spec.errors import InputError

    if tokens is None:
        raise InputError("--tokens", None, "is missing", "with --params, say how many, e.g. 300B")
    if not 1e-6 <= tflops <= 1e6:
        raise InputError("--tflops", tflops, "must be from 1e-6 to 1,000,000 (a GPU reaches some hundreds)")
    count = textbook.counted(params)
    return textbook.training(count, textbook.counted(tokens, "--tokens"), tflops * 1e12, _counts(gpus or "1,1024"))


_MOST = 10**9
"""GPUs, as in files."""


def _counts(text: str) -> list[int]:
    """Read numbers of GPUs, ascending; a single one stands for four halvings of it too. Raises InputError."""
    from phalanx.spec.errors import InputError

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError("--gpus", text, "is not a list of numbers", "write 1024, or 64,128,256") from None
    if not 1 <= min(counts) <= max(counts) <= _MOST:
        raise InputError("--gpus", text, f"must be from 1 to {_MOST:,}")
    if len(counts) > 1:
        return sorted(counts)
    return sorted({max(1, counts[0] // 2**k) for k in range(5)})
