"""`phalanx scaling`, `memory`, `comm`, `roofline` and `cases`: the textbook's tables for any model and cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.observed import observation_in, show_price
from phalanx.cli.options import (
    Batch,
    Cluster,
    Csv,
    Gpus,
    Json,
    Model,
    OptionalStack,
    Params,
    Plan,
    Plot,
    Precision,
    Seq,
    ServedCache,
    ServedWeights,
    Serving,
    Stack,
    StackOptionsLine,
    StrategyLine,
)
from phalanx.cli.show import show_notes
from phalanx.cli.terminal import announce, console, exit_on_error, in_progress, print_json, require_drawing
from phalanx.cli.unread import require_only

if TYPE_CHECKING:
    from phalanx.commands.question import Asked, Question
    from phalanx.plan.tables.table import Sheet
    from phalanx.report.pictures.figure import Picture
    from phalanx.spec.model.spec import ModelSpec

Pictures = Callable[[], list["Picture"]]
_OF_A_STRATEGY = (
    "plan",
    "strategy",
    "model",
    "cluster",
    "gpus",
    "batch",
    "seq",
    "stack",
    "precision",
    "options",
)
"""What a table of a strategy reads."""

_RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


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
        from phalanx.plan import question
        from phalanx.plan.search import HEADROOM
        from phalanx.plan.tables import scaling as tables
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
            from phalanx.report.gallery.choosing import scaling_of

            return [scaling_of(sheets[:3], f"{model} on {cluster}, {batch or 0:,} x {seq or 0:,} tokens")]

        print_sheets(sheets, as_json, as_csv, plot, of="scaling", pictures=pictures)


def memory(
    line: typer.Context,
    plan: Plan = None,
    strategy: StrategyLine = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    stack: OptionalStack = None,
    precision: Precision = None,
    options: StackOptionsLine = None,
    params: Params = None,
    policy: Annotated[
        int,
        typer.Option(
            "--bytes-per-parameter",
            help="Bytes of state per parameter: 16 (weight 2, gradient 2, master and moments 12), 12, 18 or 20.",
        ),
    ] = 16,
    card: Annotated[float, typer.Option("--card", help="Memory of a GPU in GB.")] = 80.0,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Sequences per micro-batch.")] = 1,
    seq: Seq = None,
    serving: Serving = False,
    weights: ServedWeights = None,
    kv: ServedCache = None,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Tabulate the memory of a model's state by level of ZeRO, and of its activations by recomputation, tp and sp.

    Of a plan, or of --model with --cluster, --gpus, --batch, --seq and --strategy: the memory of that strategy.
    """
    with exit_on_error():
        require_drawing(plot)
        of_training = (plan, strategy, batch, stack, precision, options, params)
        if serving or weights or kv:
            from phalanx.cli.serving_tables import sheets as of_serving

            tables = of_serving("memory", serving, of_training, model, cluster, seq, weights, kv, gpus)
            print_sheets(tables, as_json, as_csv, plot, of="memory")
            return
        asked = (plan, strategy, cluster, gpus, batch, stack, precision, options)
        if any(value is not None for value in asked):
            from phalanx.commands.question import Asked
            from phalanx.spec.errors import InputError

            if params is not None:
                raise InputError("--params", params, "has no shape to split", "name a --model, or leave the rest out")
            require_only(line, *_OF_A_STRATEGY, reason="is not about a strategy, whose memory is priced")
            _memory_of(
                Asked(plan, model, cluster, gpus, batch, seq, strategy, stack, precision, setting=options),
                as_json,
                as_csv,
                plot,
            )
            return
        from phalanx.plan.tables import textbook

        if params is not None and model is None:
            require_only(line, "params", "policy", "card", reason="is about activations, which need a --model")
        _require_positive({"--card": card, "--micro-batch": micro_batch, "--seq": seq})
        spec, count = _sized(model, params)
        sheets = [textbook.state(count, _RANKS, policy, card * 1e9)]
        if spec is not None:
            degrees = [t for t in (1, 2, 4, 8, 16) if spec.heads % t == 0]
            sheets.append(textbook.activations(spec, micro_batch, seq or spec.max_seq, degrees))
        sheets += [textbook.kinds(count, policy), textbook.savings(_RANKS, policy)]

        def pictures() -> list[Picture]:
            from phalanx.report.gallery.memory import activations_of, memory_wall, parameter_bytes
            from phalanx.report.plots import picture

            drawn = [parameter_bytes(f"{count:.6g}", policy=policy), memory_wall(), picture(sheets[:1], "memory")]
            named = str(model)
            return [*drawn, activations_of(spec, named, micro_batch, seq or spec.max_seq)] if spec else drawn

        print_sheets(sheets, as_json, as_csv, plot, of="memory", pictures=pictures)
        if spec is None:
            announce(f"note: {textbook.FOLLOWS}")


def _memory_of(asked: Asked, as_json: bool, as_csv: bool, plot: Path | None) -> None:
    """Print the memory of a strategy by what occupies it, as `predict` and `explain` have it. Raises InputError."""
    from phalanx.commands.question import read
    from phalanx.plan.explain.exact import ExactExplanation
    from phalanx.plan.tables.memory import sheet

    question = read(asked)
    show_notes(question.notes)
    if question.exact is not None:
        usable = question.exact.cluster.device.usable_bytes
        exact = ExactExplanation(question.exact.chosen, (), usable)
        table = sheet(
            question.exact.strategy, exact.memory_terms, float(exact.chosen.prediction.memory_bytes), usable
        )
    else:
        e = question.estimate
        terms = {name: float(value) for name, value in e.memory.terms.items()}
        assert question.strategy is not None
        table = sheet(question.strategy, terms, float(e.memory.reserved), int(e.allocatable_bytes))
    print_sheets([table], as_json, as_csv, plot, question, "memory")


def comm(
    line: typer.Context,
    plan: Plan = None,
    strategy: StrategyLine = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    stack: OptionalStack = None,
    precision: Precision = None,
    options: StackOptionsLine = None,
    params: Params = None,
    rate: Annotated[
        float, typer.Option("--rate", help="Bandwidth of a rank in one direction, in GB/s, with --params.")
    ] = 25.0,
    beside: Annotated[
        float | None,
        typer.Option("--beside", metavar="SECONDS", help="Put --params beside so many seconds of computing a step."),
    ] = None,
    top_k: Annotated[
        float | None,
        typer.Option("--top-k", metavar="SHARE", help="Of --params, send the largest share of gradients alone."),
    ] = None,
    serving: Serving = False,
    weights: ServedWeights = None,
    kv: ServedCache = None,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Tabulate what each mesh axis of a strategy sends: payload, bytes by tier, time, and whether it is hidden.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy, or --params alone.
    """
    with exit_on_error():
        from phalanx.spec.errors import InputError

        require_drawing(plot)
        of_training = (plan, strategy, batch, stack, precision, options, params)
        if serving or weights or kv:
            from phalanx.cli.serving_tables import sheets as of_serving

            tables = of_serving("comm", serving, of_training, model, cluster, seq, weights, kv, gpus)
            print_sheets(tables, as_json, as_csv, plot, of="comm")
            return
        if params is not None:
            from phalanx.plan.tables import textbook

            reason = "is about a strategy, and a number of parameters has no shape to split"
            remedy = "leave it out, or --params"
            require_only(line, "params", "rate", "beside", "top_k", reason=reason, remedy=remedy)
            _require_positive({"--rate": rate, "--beside": beside, "--top-k": top_k})
            about = {"--model": model, "--cluster": cluster, "--gpus": gpus, "--strategy": strategy}
            for name, given in about.items():
                if given is not None:
                    raise InputError(name, given, "is not read with --params", "leave it out; --rate sets the links")
            if top_k is not None and top_k > 1:
                raise InputError("--top-k", top_k, "is more than all", "use a share such as 0.01")
            count = textbook.counted(params)
            sheets = [textbook.gradient_traffic(count, _RANKS, rate * 1e9)]
            sheets += [] if beside is None else [textbook.beside(count, _RANKS, rate * 1e9, beside)]
            sheets += [] if top_k is None else [textbook.top_k(count, _RANKS, top_k)]
            print_sheets(sheets, as_json, as_csv, plot, of="comm")
            announce(f"note: {textbook.FOLLOWS}")
            return

        reason = "is about gradients of a number of parameters"
        require_only(line, *_OF_A_STRATEGY, reason=reason, remedy="add --params 7B")
        if (seen := observation_in(plan, line)) is not None:
            show_price(seen, cluster, as_json, collectives=True)
            return

        from phalanx.commands.question import Asked, read
        from phalanx.plan.tables.communication import exact_sheet, sheet

        asked = read(Asked(plan, model, cluster, gpus, batch, seq, strategy, stack, precision, setting=options))
        show_notes(asked.notes)
        table = exact_sheet(asked.exact) if asked.exact is not None else sheet(asked.subject)
        print_sheets([table], as_json, as_csv, plot, asked, "comm")


def roofline(
    line: typer.Context,
    plan: Plan = None,
    strategy: StrategyLine = None,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    stack: OptionalStack = None,
    precision: Precision = None,
    options: StackOptionsLine = None,
    params: Params = None,
    serving: Serving = False,
    weights: ServedWeights = None,
    kv: ServedCache = None,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Tabulate ridge points of the known systems and, for a strategy, the intensity of each operator.

    To include a strategy name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy.
    """
    with exit_on_error():
        require_drawing(plot)
        of_training = (plan, strategy, batch, stack, precision, options, params)
        if serving or weights or kv:
            from phalanx.cli.serving_tables import sheets as of_serving

            tables = of_serving("roofline", serving, of_training, model, cluster, seq, weights, kv, gpus)
            print_sheets(tables, as_json, as_csv, plot, of="roofline")
            return
        from phalanx.plan.tables.roofline import ridges, rooflines

        if params is not None:
            there = cluster or "dgx-h100"
            reason = "is about a strategy, and a number of parameters has no shape to split"
            require_only(line, "params", "cluster", "seq", reason=reason, remedy="leave it out, or --params")

            def of_links() -> list[Picture]:
                from phalanx.report.gallery.hardware import comm_roofline, staircase

                return [comm_roofline(there), staircase(there)]

            sheets = _intensities(params, there, 2048 if seq is None else seq)
            print_sheets(sheets, as_json, as_csv, plot, of="roofline", pictures=of_links)
            return

        asked, sheets = None, [ridges()]
        if plan is None and model is None:
            remedy = "name a --model or a plan.json, or leave it out"
            require_only(line, reason="is about a strategy, of which there is none", remedy=remedy)
        else:
            from phalanx.commands.question import Asked, read

            asked = read(Asked(plan, model, cluster, gpus, batch, seq, strategy, stack, precision, setting=options))
            show_notes(asked.notes)
            assert asked.strategy is not None
            sheets += rooflines(asked.pricing, asked.strategy)

        def pictures() -> list[Picture]:
            from phalanx.plan.explain.operators import training
            from phalanx.report.gallery.hardware import compute_roofline, job_roofline

            if asked is None or asked.strategy is None:
                return [compute_roofline()]
            p = asked.pricing
            return [
                job_roofline(p.cluster, f"{asked.strategy} on {p.cluster.name}", training(p, asked.strategy)),
                compute_roofline(),
            ]

        print_sheets(sheets, as_json, as_csv, plot, asked, "roofline", pictures)


def cases(
    rules: Annotated[
        bool, typer.Option("--rules", help="Examine the usual rules of thumb, and list when each axis pays.")
    ] = False,
    tree: Annotated[
        bool,
        typer.Option("--tree", help="Draw the usual tree of decisions; with --model and so on, mark a job's path."),
    ] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Say what was published of each training, without a search.")
    ] = False,
    model: Model = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    batch: Batch = None,
    seq: Seq = None,
    plot: Plot = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Compare the strategies of published trainings, as measured and as predicted, with what a search chooses."""
    with exit_on_error():
        require_drawing(plot)
        if tree:
            if as_csv:
                from phalanx.spec.errors import InputError

                raise InputError("--csv", None, "has no columns for a tree", "use --json")
            _draw_tree(model, cluster, gpus, batch, seq, plot, as_json)
            return
        if any(value is not None for value in (model, cluster, gpus, batch, seq)):
            from phalanx.spec.errors import InputError

            raise InputError("--model", model, "goes with --tree alone", "add --tree, or leave the job out")
        if plot is not None:
            from phalanx.spec.errors import InputError

            raise InputError("--plot", str(plot), "draws the tree alone", "add --tree, or leave it out")
        from phalanx.plan.tables import case_studies as studied
        from phalanx.plan.tables import rules_of_thumb as taught

        if rules:
            from phalanx.plan.tables import criteria

            sheets = [taught.sheet(), criteria.sheet()]
        elif published:
            sheets = [studied.published()]
        else:
            results = in_progress(map(studied.study, studied.CASES), "trainings studied", len(studied.CASES))
            sheets = [studied.sheet(list(results))]
        print_sheets(sheets, as_json, as_csv)


def _draw_tree(
    model: str | None,
    cluster: str | None,
    gpus: int | None,
    batch: int | None,
    seq: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print the tree of decisions, with a job's path if one is given. Raises InputError for half a job."""
    from phalanx.plan import question
    from phalanx.plan.explain import decision_tree
    from phalanx.spec.errors import InputError

    asked = {"--model": model, "--cluster": cluster, "--gpus": gpus, "--batch": batch, "--seq": seq}
    facts = None
    if any(value is not None for value in asked.values()):
        missing = next((name for name, value in asked.items() if value is None), None)
        if missing:
            raise InputError(
                missing, None, "is missing", "a path needs --model, --cluster, --gpus, --batch and --seq"
            )
        question.require_counts(("--gpus", gpus or 0), ("--batch", batch or 0), ("--seq", seq or 0))
        spec, _ = question.model_named(str(model))
        there = question.cluster_named(str(cluster))(int(gpus or 0))
        facts = decision_tree.facts(spec, there, int(gpus or 0), int(batch or 0), int(seq or 0))
    path = None if facts is None else decision_tree.walk(facts)[0]
    from phalanx.report.gallery.choosing import decisions
    from phalanx.report.pictures.files import panel_text, write

    drawn = decisions(path, f"{model} on {gpus} GPUs of {cluster}" if path else "")
    if plot is not None:
        write([drawn], plot)
        announce(f"wrote {plot}")
    if as_json:
        print_json(decision_tree.as_json(facts))
        return
    for panel in drawn.panels:
        print("\n".join(panel_text(panel)))


def _training(params: str, tokens: str | None, tflops: float, gpus: str) -> Sheet:
    """Return the days of a training by number of GPUs. Raises InputError."""
    from phalanx.plan.tables import textbook
    from phalanx.spec.errors import InputError

    if tokens is None:
        raise InputError("--tokens", None, "is missing", "with --params, say how many, e.g. 300B")
    _require_positive({"--tflops": tflops})
    count = textbook.counted(params)
    return textbook.training(count, textbook.counted(tokens, "--tokens"), tflops * 1e12, _counts(gpus or "1,1024"))


def _intensities(params: str, cluster: str, seq: int) -> list[Sheet]:
    """Return the FLOP per byte sent by batch size, over the links inside a node and those between nodes."""
    from phalanx.cost.analytic.chips import system_of
    from phalanx.plan import question
    from phalanx.plan.tables import textbook

    _require_positive({"--seq": seq})
    node = question.cluster_named(cluster)(1)
    pair = question.cluster_named(cluster)(2 * node.ranks_per_node)
    peak = float(system_of(pair).peak_bf16)
    rates = {t.name: t.bandwidth_bytes_per_s_per_gpu_per_direction for t in (pair.tiers[0], pair.tiers[-1])}
    count = textbook.counted(params)
    return [textbook.intensity(count, seq, (1, 4, 16, 32, 64, 256), peak, rates[name], name) for name in rates]


def _require_positive(numbers: dict[str, float | None]) -> None:
    """Require that options which were given are positive and finite. Raises InputError."""
    from phalanx.spec.errors import InputError

    for name, value in numbers.items():
        if value is not None and not 0 < value < float("inf"):
            raise InputError(name, value, "must be positive")


def _sized(model: str | None, params: str | None) -> tuple[ModelSpec | None, float]:
    """Return (model or None, number of parameters). Raises InputError."""
    from phalanx.plan import question
    from phalanx.plan.tables import textbook
    from phalanx.spec.errors import InputError

    if (model is None) == (params is None):
        raise InputError("--model", model, "give either a model or --params")
    if params is not None:
        return None, textbook.counted(params)
    spec, _ = question.model_named(str(model))
    return spec, float(spec.parameter_count)


def _counts(text: str) -> list[int]:
    """Read numbers of GPUs, ascending; a single one stands for four halvings of it too. Raises InputError."""
    from phalanx.spec.errors import InputError

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError("--gpus", text, "is not a list of numbers", "write 1024, or 64,128,256") from None
    if min(counts) < 1:
        raise InputError("--gpus", text, "must be at least 1")
    if len(counts) > 1:
        return sorted(counts)
    return sorted({max(1, counts[0] // 2**k) for k in range(5)})


def _draw(of: str, sheets: list[Sheet], pictures: Pictures | None, file: Path) -> None:
    """Draw tables as the file's name asks: the pictures of their subject, or the columns over the first one.

    Raises InputError."""
    from phalanx.report.pictures.files import write
    from phalanx.report.plots import picture

    drawn = pictures() if pictures is not None else []
    if file.suffix.lower() == ".html":
        from phalanx.report.html.sheets import report

        file.write_text(report(sheets, drawn))
    else:
        write(drawn or [picture(sheets, of)], file)


def print_sheets(
    sheets: Iterable[Sheet],
    as_json: bool,
    as_csv: bool,
    plot: Path | None = None,
    asked: Question | None = None,
    of: str = "",
    pictures: Pictures | None = None,
) -> None:
    """Print sheets; `asked`: the question that they are about; `of`: the command; `pictures`: makes what
    --plot draws, if that is more than the columns."""
    sheets = list(sheets)
    if plot is not None:
        _draw(of, sheets, pictures, plot)
        announce(f"wrote {plot}")
    if as_json:
        about = {} if asked is None else {"question": asked.as_json()}
        print_json([{**about, "title": s.title, "rows": s.records(), "note": s.note} for s in sheets])
    elif as_csv:
        print("\n".join(s.as_csv() for s in sheets), end="")
    else:
        from phalanx.report.sheets import drawn

        out = console()
        if asked is not None:
            out.print(asked.heading, highlight=False, soft_wrap=True)
        for sheet in sheets:
            out.print(drawn(sheet))
