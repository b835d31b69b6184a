"""`phalanx scaling`, `memory`, `comm` and `roofline`: the textbook's tables for any model and cluster."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.explain import subject
from phalanx.cli.options import Batch, Cluster, Csv, Gpus, Line, Model, Params, Plan, Plot, Profile, Seq
from phalanx.cli.terminal import Json, announce, console, mistakes, print_json, require_writable

if TYPE_CHECKING:
    from phalanx.plan.tables.table import Sheet

_RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def scaling(
    model: Model = None,
    cluster: Cluster = "dgx-h100",
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="8,16,...|N", help="Numbers of GPUs; N: doublings up to N.")
    ] = "",
    batch: Batch = None,
    seq: Seq = None,
    params: Params = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="300B", help="With --params: to train on.")
    ] = None,
    rate: Annotated[float, typer.Option("--tflops", help="With --params: TFLOP/s that each GPU reaches.")] = 150.0,
    devices: Annotated[
        str | None,
        typer.Option("--devices", metavar="v100,a100,h100", help="What the device changes, at the most GPUs."),
    ] = None,
    profile: Profile = None,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Strong and weak scaling, efficiency against the batch, what the network and the device change."""
    with mistakes():
        require_writable("--plot", plot)
        from phalanx.plan import question
        from phalanx.plan.tables import scaling as tables
        from phalanx.spec.errors import InputError, nearest

        if params is not None:
            _print([_training(params, tokens, rate, gpus)], as_json, as_csv, plot)
            return
        for name, given in (("--model", model), ("--gpus", gpus), ("--batch", batch), ("--seq", seq)):
            if not given:
                raise InputError(name, None, "is missing", "scaling needs --model, --gpus, --batch and --seq")
        counts = _counts(gpus)
        spec, _ = question.model_named(str(model))
        stack = profile or "megatron-core"

        def on(name: str) -> tables.Question:
            return question.asked(spec, question.cluster_named(name), batch or 0, seq or 0, stack)

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
        _print(sheets, as_json, as_csv, plot)


def memory(
    model: Model = None,
    params: Params = None,
    policy: Annotated[
        int, typer.Option("--bytes-per-parameter", help="16: weight 2, gradient 2, master and moments 12; 18; 20.")
    ] = 16,
    card: Annotated[float, typer.Option("--card", help="Memory of a card, in GB.")] = 80.0,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Sequences at once.")] = 1,
    seq: Seq = None,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """What a model's state takes by ZeRO stage and ranks, and its activations by recomputation, tp and sp."""
    with mistakes():
        require_writable("--plot", plot)
        from phalanx.plan import question
        from phalanx.plan.tables import textbook

        _require_positive({"--card": card, "--micro-batch": micro_batch, "--seq": seq})
        spec, count = _sized(model, params)
        sheets = [textbook.state(count, _RANKS, policy, card * 1e9)]
        if spec is not None:
            found, _ = question.model_named(str(model))
            degrees = [t for t in (1, 2, 4, 8, 16) if found.heads % t == 0]
            sheets.append(textbook.activations(found, micro_batch, seq or found.max_seq, degrees))
        _print(sheets, as_json, as_csv, plot)
        if spec is None:
            announce(f"note: {textbook.FOLLOWS}")


def comm(
    plan: Plan = None,
    strategy: Line = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    profile: Profile = None,
    params: Params = None,
    rate: Annotated[float, typer.Option("--rate", help="GB/s of a rank in one direction, with --params.")] = 25.0,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """What each axis of a strategy sends: payload, bytes on the wire by tier, operations, time, hidden or not."""
    with mistakes():
        require_writable("--plot", plot)
        if params is not None:
            from phalanx.plan.tables import textbook

            _require_positive({"--rate": rate})
            _print([textbook.gradient_traffic(textbook.counted(params), _RANKS, rate * 1e9)], as_json, as_csv, plot)
            announce(f"note: {textbook.FOLLOWS}")
            return

        from phalanx.plan.tables.communication import sheet

        _print([sheet(subject(plan, strategy, model, cluster, gpus, batch, seq, profile))], as_json, as_csv, plot)


def roofline(
    plan: Plan = None,
    strategy: Line = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    profile: Profile = None,
    params: Params = None,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Ridge points of the known systems; of a strategy also each operator's intensity, training and decoding."""
    with mistakes():
        require_writable("--plot", plot)
        from phalanx.plan.tables.roofline import ridges, rooflines

        if params is not None:
            _print(_intensities(params, cluster or "dgx-h100", 2048 if seq is None else seq), as_json, as_csv, plot)
            return

        sheets = [ridges()]
        if plan is not None or model is not None:
            x = subject(plan, strategy, model, cluster, gpus, batch, seq, profile)
            sheets += rooflines(x.pricing, x.strategy)
        _print(sheets, as_json, as_csv, plot)


def cases(
    rules: Annotated[bool, typer.Option("--rules", help="The taught rules instead.")] = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Published trainings: the strategy that was used, its measured and predicted step, and what a search chooses."""
    with mistakes():
        from phalanx.plan.tables import case_studies as studied
        from phalanx.plan.tables import rules_of_thumb as taught

        _print([taught.sheet() if rules else studied.sheet()], as_json, as_csv)


def _training(params: str, tokens: str | None, tflops: float, gpus: str) -> Sheet:
    from phalanx.plan.tables import textbook
    from phalanx.spec.errors import InputError

    if tokens is None:
        raise InputError("--tokens", None, "is missing", "with --params, say on how many: 300B")
    _require_positive({"--tflops": tflops})
    count = textbook.counted(params)
    return textbook.training(count, textbook.counted(tokens, "--tokens"), tflops * 1e12, _counts(gpus or "1,1024"))


def _intensities(params: str, cluster: str, seq: int) -> list[Sheet]:
    """Over the links in a node, and over those between nodes."""
    from phalanx.cost.analytic.chips import system_of
    from phalanx.plan import question
    from phalanx.plan.tables import textbook

    _require_positive({"--seq": seq})
    node = question.cluster_named(cluster)(1)
    found = question.cluster_named(cluster)(2 * node.ranks_per_node)
    peak = float(system_of(found).peak_bf16)
    rates = {t.name: t.bandwidth_bytes_per_s_per_gpu_per_direction for t in (found.tiers[0], found.tiers[-1])}
    count = textbook.counted(params)
    return [textbook.intensity(count, seq, (1, 4, 16, 32, 64, 256), peak, rates[name], name) for name in rates]


def _require_positive(numbers: dict[str, float | None]) -> None:
    from phalanx.spec.errors import InputError

    for name, given in numbers.items():
        if given is not None and not 0 < given < float("inf"):
            raise InputError(name, given, "must be positive")


def _sized(model: str | None, params: str | None) -> tuple[object, float]:
    from phalanx.plan import question
    from phalanx.plan.tables import textbook
    from phalanx.spec.errors import InputError

    if (model is None) == (params is None):
        raise InputError("--model", model, "name a model, or --params, and not both")
    if params is not None:
        return None, textbook.counted(params)
    spec, _ = question.model_named(str(model))
    return spec, float(spec.parameter_count)


def _counts(text: str) -> list[int]:
    from phalanx.spec.errors import InputError

    try:
        given = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError("--gpus", text, "is not a list of numbers", "write 1024, or 64,128,256") from None
    if min(given) < 1:
        raise InputError("--gpus", text, "must be at least 1")
    if len(given) > 1:
        return sorted(given)
    return sorted({max(1, given[0] // 2**k) for k in range(5)})


def _print(sheets: Iterable[Sheet], as_json: bool, as_csv: bool, plot: Path | None = None) -> None:
    sheets = list(sheets)
    if plot is not None:
        from phalanx.report.plots import svg

        plot.write_text(svg(sheets))
        announce(f"wrote {plot}")
    if as_json:
        print_json([{"title": s.title, "rows": s.records(), "note": s.note} for s in sheets])
    elif as_csv:
        print("\n".join(s.as_csv() for s in sheets), end="")
    else:
        from phalanx.report.sheets import drawn

        out = console()
        for sheet in sheets:
            out.print(drawn(sheet))
