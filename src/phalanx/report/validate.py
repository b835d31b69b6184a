"""Views of the errors of predictions against published runs and kernels, and of the quality of predicted choices."""

from collections.abc import Mapping
from typing import Any

from phalanx.answers.validate import ChoiceScores, CollectiveScores, KernelScores, PredictionScores
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.style import count_words
from phalanx.report.view import View
from phalanx.validate.prediction_error import PredictionError

_PLACES = {
    "time": "step time",
    "memory_allocated": "allocated",
    "memory_reserved": "reserved",
    "memory_shown": "shown",
}


def view(a: PredictionScores) -> View:
    """Show the errors by source family, whether runs fit, and what was left out."""
    parts: list[str | Sheet] = [] if a.runs is None else [side_by_side(a.runs)]
    if any(a.scores[key]["n"] for key in (*_PLACES, "fit")):
        parts += [families(a.scores), *overall(a.scores)]
    else:
        parts.append("none of these rows can be predicted")
    if a.scores["replaced_stacks"]:
        parts.append(replaced_stacks(a.scores))
    return View([*parts, reasons(a.scores)], "validate")


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def families(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate the error by source family and quantity; "left out": with constants fitted without the family. Runs
    priced by a generic stack have a row of their own, and are not in `all`."""
    kinds = [name.split("/")[0] for name in scores["by_kind"]]
    lines = [(name, scored, _PLACES) for name, scored in scores["by_family"].items()]
    lines += [
        (name, scored, {"time": _PLACES["time"]})
        for name, scored in scores["by_kind"].items()
        if kinds.count(name.split("/")[0]) > 1
    ]
    lines.sort(key=lambda line: line[0].split("/")[0])
    generic = [("generic stacks", scores["generic_stacks"], _PLACES)] if "generic_stacks" in scores else []
    rows = []
    for family, scored, places in [*lines, ("all", scores, _PLACES), *generic]:
        for key, shown in places.items():
            e = scored[key]
            if e["n"]:
                errors = (_share(e[name]) for name in ("mape", "median", "p90", "bias"))
                blind = scored["time_left_out"] if key == "time" else {"mape": None, "median": None}
                left_out = map(_share, (blind["mape"], blind["median"]))
                rows.append((family, shown, e["n"], *errors, e["spearman"], *left_out))
    names = columns(
        "family | of | runs [count] | mean [share] | median [share] | p90 [share] | bias [change] "
        "| rank corr. [number] | left out: mean [share] | left out: median [share]"
    )
    return Sheet("error of predictions against published runs", names, rows, charted=False, keys=2)


def side_by_side(compared: PredictionError) -> Sheet:
    """Tabulate every run: published and predicted step time, and the error."""
    rows = []
    for prediction in compared.time:
        r = prediction.row
        degrees = {n: r[n] for n in ("tp", "cp", "pp", "vpp", "ep", "dp", "mbs") if r[n] not in ("", "1")}
        layout = " ".join(f"{n}={v}" for n, v in degrees.items())
        full = " full recompute" if r["act_ckpt"].startswith("full") else ""
        gpus = f"{r['gpus']} {r['gpu'].split('-')[0]}"
        times = (prediction.measured, prediction.predicted, prediction.predicted / prediction.measured - 1)
        rows.append((r["model"], gpus, layout + full, f"{r['gbs']} x {r['seq_len']}", r["precision"], *times))
    names = columns(
        "model | GPUs | layout | batch x seq | number format | published [number] | predicted [number] "
        "| error [change]"
    )
    return Sheet("step time, seconds", names, rows, charted=False)


def overall(scores: Mapping[str, Any]) -> list[str]:
    """Return sentences on the predictions of whether runs fit, and of collectives' times."""
    lines = []
    for key, where in (("fit", "of all"), ("fit_near", "of those predicted at half to twice the card")):
        f = scores[key]
        if f["n"]:
            lines.append(
                f"fits or not: {f['accuracy']:.1f} % right {where} ({f['n']}; {f['tp']} fit and {f['tn']} do not as "
                f"predicted, {f['fp']} did not fit, {f['fn']} did after all)"
            )
    if "collectives" in scores:
        for name, e in scores["collectives"].items():
            if isinstance(e, Mapping) and e.get("n"):
                what = "all-reduce" if name == "all_reduce" else "other collectives"
                errors = f"{e['median']:.1f} % in the median, {e['mape']:.1f} % on average ({e['n']})"
                lines.append(f"{what}: time off by {errors}")
    return lines


def replaced_stacks(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate the unknown stacks, and the stack that each is priced as."""
    how = {True: "a generic stack, scored apart", False: "the nearest release"}
    rows = [(r["stated"], r["priced_as"], how[r["generic"]], r["rows"]) for r in scores["replaced_stacks"]]
    names = columns("stated | priced as |  | rows [count]")
    return Sheet("stacks that are not known", names, rows, charted=False)


def reasons(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate why rows were left out."""
    families = scores["skipped"]["reasons"].items()
    rows = [(family, count, why) for family, counts in families for why, count in counts.items()]
    names = columns("family | rows [count] | reason")
    return Sheet(f"{count_words(scores['skipped']['n'], 'row')} left out", names, rows, charted=False)


_SAYS = {
    "product": "matrix products, 16 to 4 bits",
    "prompt attention": "attention of prompts",
    "decode attention": "attention in decoding",
    "mla prompt": "latent attention of prompts",
    "mla decode": "latent attention in decoding",
    "experts": "routed experts",
    "all-reduce": "all-reduce in a node",
}


def kernels(a: KernelScores) -> View:
    """Show errors by kind of kernel and by chip, and the rows left out."""
    chips = {**a.scores["by_gpu"], "all of them": a.scores["kernels"]}
    kinds = {_SAYS.get(name, name): e for name, e in a.scores["by_kind"].items()}
    parts: list[str | Sheet] = ["none of these rows can be predicted"] if not kinds else []
    if kinds:
        parts.append(_kernel_table("kernels: absolute error", "kind", kinds))
    if a.scores["by_gpu"]:
        parts.append(_kernel_table("by chip, without all-reduces", "chip", chips))
    return View([*parts, *_skipped_rows(a.scores), kernel_notes(a.scores)], "validate")


def collectives(a: CollectiveScores) -> View:
    """Show errors by chip and operation, and the rows left out."""
    each = [(chip, op, e) for chip, by_op in a.scores["by_chip"].items() for op, e in by_op.items()]
    rows = [
        (chip, op, e["n"], e["median"] / 100, e["p90"] / 100, e["bias"] / 100)
        for chip, op, e in [*each, ("all of them", "", a.scores["all"])]
        if e["n"]
    ]
    names = columns("chip | operation | measured [count] | median [share] | 90 % [share] | bias [change]")
    table = Sheet("collectives: absolute error", names, rows, charted=False, keys=2)
    return View([table if rows else "none of these rows can be predicted", *_skipped_rows(a.scores)], "validate")


def _skipped_rows(scores: Mapping[str, Any]) -> list[str | Sheet]:
    """Tabulate the rows that are left out, by reason."""
    rows = sorted(scores["refused"].items(), key=lambda reason: -reason[1])
    return [Sheet("left out", columns("reason | rows [count]"), rows, charted=False)] if rows else []


def _kernel_table(title: str, first: str, scores: Mapping[str, Mapping[str, Any]]) -> Sheet:
    rows = []
    for name, e in scores.items():
        errors = (e["median"], e["p90"], e["left_out"]["median"], e["left_out"]["p90"])
        rows.append((name, e["n"], *(value / 100 for value in errors)))
    names = columns(
        first, "measured [count] | median [share] | 90 % [share] | left out: median [share] | left out: 90 % [share]"
    )
    return Sheet(title, names, rows, charted=False)


def kernel_notes(scores: Mapping[str, Any]) -> str:
    """Return lines that explain `left out`, and count the rows that are not modelled."""
    return (
        "left out: by constants fitted without the chip: from its datasheet and other generations where no other\n"
        "chip of its own was measured (A100, RTX PRO 6000, L40S).\n"
        f"Not modelled: {scores['not_modelled']:,} rows in other integer types"
    )


_LINKS = {"cluster": "measured", "datasheet": "datasheet"}
_WORST = 5
"""How many of the worst sweeps are listed."""


def choices(a: ChoiceScores) -> View:
    """Show how good choices are among sweeps and against recipes that experts tuned."""
    s, parts = a.scores, list[str | Sheet]()
    tuned = any(kind["n"] for kind in s["recipes"].values())
    if s["sweeps"]["n"]:
        parts += [sweeps(s), worst_sweeps(s)]
    if tuned:
        parts += [*([each_recipe(s)] if a.each else []), recipes(s), options(s)]
    if not s["sweeps"]["n"] and not tuned:
        parts.append(f"no recipe, and no question with enough strategies, among {a.rows} rows")
    if s["left_out"]:
        rows = [(count, reason) for reason, count in s["left_out"].items()]
        parts.append(Sheet("runs that are no recipe, and why", columns("runs [count] | reason"), rows, charted=False))
    return View(parts, "validate")


def sweeps(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate the sweeps by family and links: rank correlation, regret of the strategy predicted to be fastest,
    strategies that ran but are predicted not to fit, and sweeps whose choice ran out of memory (OOM)."""
    rows = []
    for family, by_links in [*scores["sweeps"]["by_family"].items(), ("all", scores["sweeps"]["links"])]:
        for links, name in _LINKS.items():
            s = by_links[links]
            if s["n"]:
                rows.append((family, name, *(s[key] for key in _SWEEP_COLUMNS)))
    names = columns(
        "family | links | sweeps [count] | strategies [count] | rank corr. [number] | median [share] "
        "| p90 [share] | left out p90 [share] | refused [count] | OOM [count]"
    )
    title = "sweeps: regret of the first predicted of the strategies measured for one question"
    return Sheet(title, names, rows, charted=False, keys=2)


_SWEEP_COLUMNS = (
    *("n", "strategies", "spearman_median", "regret_median", "regret_p90", "regret_p90_left_out"),
    *("refused", "chosen_out_of_memory"),
)


def worst_sweeps(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate the sweeps of most regret, with links as measured."""
    rows = []
    for s in sorted(scores["sweeps"]["each"]["cluster"], key=lambda s: -s["regret"])[:_WORST]:
        chosen = _line(s["chosen"]) + (", ran out of memory" if s["chosen_out_of_memory"] else "")
        rows.append((s["question"], s["strategies"], s["spearman"], s["regret"], chosen or "none"))
    names = columns(
        "question | strategies [count] | rank corr. [number] | regret [share] | first that is predicted to fit"
    )
    return Sheet("sweeps of most regret, links as measured", names, rows, charted=False)


def recipes(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate the recipes that experts tuned: the best strategy predicted against theirs."""
    rows = []
    for kind, r in scores["recipes"].items():
        if r["n"]:
            differ = ", ".join(f"{name} {n}" for name, n in r["fields_that_differ"].items())
            numbers = (r[key] for key in ("n", "ratio_p10", "ratio_median", "ratio_p90", "said_to_fit"))
            rows.append((kind, *numbers, differ))
    names = columns(
        "models | recipes [count] | ratio p10 [number] | median [number] | p90 [number] | fit [share] "
        "| fields that differ, and how often"
    )
    title = "recipes that experts tuned: predicted step time of the best strategy over that of theirs"
    return Sheet(title, names, rows, charted=False)


def options(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate the share of experts' strategies that are predicted to fit, by the option that saves their memory."""
    rows = [
        (kind, option, members["n"], members["said_to_fit"])
        for kind, r in scores["recipes"].items()
        for option, members in r["said_to_fit_by_option"].items()
    ]
    names = columns("models | option | recipes [count] | predicted to fit [share]")
    title = "which of them are predicted to fit, by the option with which they save memory"
    return Sheet(title, names, rows, charted=False)


def each_recipe(scores: Mapping[str, Any]) -> Sheet:
    """Tabulate every recipe: the expert's strategy and the one predicted to be best."""
    rows = []
    for r in (r for kind in scores["recipes"].values() for r in kind["each"]):
        best = _line(r["best"]) or "none fits"
        rows.append((r["question"], r["stack"], _line(r["expert"]), r["share_of_memory"], best, r["ratio"]))
    names = columns("question | stack | expert | of memory [share] | best predicted | ratio [number]")
    return Sheet("every recipe", names, rows, charted=False)


def _line(strategy: str) -> str:
    """Return a strategy's line with spaces, so that it wraps between fields."""
    return strategy.replace(",", ", ")
