"""Published jobs, checkpoints and failure rates compared with predictions that do not use the published result.

A figure is predicted from the other cells of its row. What these do not state is taken from presets, never from one
that was counted in the row's own source, and listed with the figure. Two jobs of one source that differ in how they
restart are a pair: one input changed.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.planning import lookup
from phalanx.reliability import presets
from phalanx.reliability.closed_form import TimeShares
from phalanx.reliability.conditions import Conditions, Premise, TrainingJob, premise_of
from phalanx.reliability.presets import HARDWARE, FailureCounts
from phalanx.reliability.scored import GoodputScores, RestartPair, ScoredFigure
from phalanx.spec.cluster.presets import PRESETS
from phalanx.spec.errors import InputError
from phalanx.validate.records import Row, load
from phalanx.validate.scores import errors

PUBLISHED = Path(__file__).parent / "data" / "goodput.csv"
_STEP_S = 10.0
"""Assumed seconds of a step: it only rounds the best interval."""
_HOURS_OF = {"month": 720.0, "day": 24.0, "year": 8760.0}
_STATE_BYTES = 14.0
"""A checkpoint's bytes a parameter: weights of 2 bytes, masters and two moments of 4 each, as in MLPerf Storage."""
_NEAR = 0.25
"""Relative error up to which a prediction needs no explanation."""


def goodput_scores(path: Path | None = None) -> GoodputScores:
    """Score the published rows, or a file of such rows. Raises InputError."""
    rows = load(path or PUBLISHED, ("row_id", "record", "source_family"))
    figures: list[ScoredFigure] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        try:
            mine = list(_figures(row))
        except InputError as error:
            left_out[str(error)] += 1
            continue
        figures += mine
        if not mine:
            left_out[_why_none(row)] += 1
    by: dict[str, dict[str, Any]] = {}
    for quantity in dict.fromkeys(f.quantity for f in figures):
        of = [f for f in figures if f.quantity == quantity and not f.bound]
        by[quantity] = errors([f.predicted for f in of], [f.published for f in of])
        off = [abs(f.error) for f in figures if f.quantity == quantity]
        by[quantity] |= {"bounds": len(off) - len(of), "within_25_percent": sum(x <= _NEAR for x in off)}
    return GoodputScores(tuple(figures), tuple(_pairs(rows, figures)), by, dict(left_out.most_common()))


def _why_none(row: Row) -> str:
    """Return why a row has no figure that can be predicted."""
    if row["record"] == "cause":
        return "a cause's count or share: what failure rates are made of"
    if row["record"] in ("restart", "detection"):
        return "a phase of a restart: what kinds of restart are made of"
    if row["effective_pct"] and "utilisation" in row["effective_kind"]:
        return "utilisation of a cluster: also idle GPUs"
    if row["effective_pct"] or row["restarts"]:
        return "neither GPUs, days nor rates are stated"
    return "a ratio, a formula or a bound, and no figure of a job"


def _figures(row: Row) -> Iterator[ScoredFigure]:
    """Yield the row's figures that can be predicted. Raises InputError."""
    yield from _effective(row)
    yield from _failures(row)
    yield from _checkpoint(row)


def _figure(
    row: Row, quantity: str, published: float, predicted: float, why: Sequence[str], bound: bool = False
) -> ScoredFigure:
    off = predicted - published if quantity in ("effective time", "uptime") else predicted / published - 1
    error = 0.0 if bound and predicted >= published else float(off)
    reasons = "; ".join(filter(None, why))
    return ScoredFigure(
        row.name, row.family, row["job"], quantity, published, float(predicted), bound, error, reasons
    )


def _text(row: Row) -> str:
    return " ".join(row[c] for c in ("job", "method", "cause", "effective_kind")).lower()


# Jobs: the share of time in which they work, and how often they fail.


def _effective(row: Row) -> Iterator[ScoredFigure]:
    published, kind = row.number("effective_pct"), row["effective_kind"].lower()
    if published is None or "utilisation" in kind or "utilization" in kind:
        return
    reasons: list[str] = []
    p = _premise(row, reasons)
    if p is None:
        return
    if p.given.interval_s is None:
        reasons.append(f"saves every {p.interval_s / 60:.0f} min, the best")
    shares = p.shares()
    uptime = "uptime" in kind
    predicted = _up(shares) if uptime else float(shares.useful)
    bound = any(word in kind for word in ("lower bound", "over", ">"))
    name = "uptime" if uptime else "effective time"
    figure = _figure(row, name, published / 100, predicted, reasons, bound)
    if abs(figure.error) > 0.02:
        figure = replace(figure, why="; ".join(filter(None, (figure.why, _miss(figure, p, shares)))))
    yield figure


def _up(shares: TimeShares) -> float:
    """Return the uptime, which counts saves and work done again but no detection, restart or wait."""
    return float(shares.useful + shares.saving + shares.lost)


def _miss(figure: ScoredFigure, p: Premise, shares: TimeShares) -> str:
    """Return the minutes that a failure would have to cost, or how often the job would have to fail, for the
    published share; as words."""
    down = float(shares.detection + shares.restart + shares.waiting)
    left = 1 - figure.published - (1 - figure.predicted - down)
    each = down / p.per_s / (1 - down) if p.per_s else 0.0
    if left <= 0 or each <= 0:
        return "no length of a restart alone explains it"
    needed = left / (1 - left) / p.per_s
    explained = f"{needed / 60:,.0f} min would explain it, or {needed / each:.1f} times as many failures"
    return f"a failure costs {each / 60:,.0f} min here; {explained}"


def _premise(row: Row, said: list[str]) -> Premise | None:
    """Return the training of a row, completed from presets, which are noted in `said`; None if the row states
    neither GPUs nor a failure rate."""
    gpus, failed = row.count("gpus"), _stated_mttf(row)
    if not gpus and failed is None:
        return None
    trained = _trained(row, gpus or 8, said)
    counts = _counts(row)
    text = _text(row)
    kind = _restart_kind(text)
    detect, recover, restart = (row.number(f"{c}_s") for c in ("detect", "recover", "restart"))
    restart = recover if restart is None else restart
    if detect is None or restart is None:
        said.append(f"restart {kind}")
    if failed is None:
        said.append(f"failures of {counts.name}")
    given = Conditions(
        failures=counts.name,
        mttf_s=None if failed is None else failed * 3600,
        restart=kind,
        detect_s=detect,
        restart_s=restart,
        interval_s=row.number("checkpoint_interval_s"),
        storage=_storage(row, said),
        write_bytes_per_s=_scaled(row.number("storage_write_gbs"), 1e9),
        read_bytes_per_s=_scaled(row.number("storage_read_gbs"), 1e9),
        save_s=row.number("checkpoint_save_s"),
        load_s=row.number("checkpoint_load_s"),
        stall_s=row.number("checkpoint_stall_s"),
        synchronous=not _asynchronous(text, row),
        spares=None,
    )
    return premise_of(trained, given)


def _scaled(value: float | None, by: float) -> float | None:
    return value * by if value else None


def _stated_mttf(row: Row) -> float | None:
    """Return the mean hours between a job's failures as its own row states them; None if it does not."""
    days, gpus = row.number("days"), row.number("gpus")
    number = row.number("interruptions_unexpected") or row.number("interruptions") or row.number("restarts")
    if number and days:
        return days * 24 / number
    hours, of = row.number("mttf_h"), row.number("mttf_gpus")
    if hours:
        return hours * of / gpus if of and gpus else hours
    per_node, nodes = row.number("failures_per_1000_node_days"), _nodes(row)
    return 24_000 / (per_node * nodes) if per_node and nodes else None


def _restart_kind(text: str) -> str:
    """Return the kind of restart that a row's words name; by default in-job, as most restarts now are automatic."""
    if "in-process" in text or "in process" in text:
        return "in-process"
    if re.search(r"\bmanual|by hand|no fault tolerance", text):
        return "manual"
    return "job" if re.search(r"requeue|resubmit|scheduler", text) else "in-job"


def _size_of_node(hardware: str) -> int:
    """Return the chips in a node of a preset with this hardware; 8 where no preset has it."""
    word = hardware.split("-")[0].split(" ")[0].upper()
    sizes = [row.size for name, row in PRESETS.items() if word and row.chip.upper().startswith(word)]
    return sizes[0] if sizes else 8


def _nodes(row: Row) -> int | None:
    gpus = row.count("gpus")
    return row.count("nodes") or (-(-gpus // _size_of_node(row["hardware"])) if gpus else None)


def _trained(row: Row, gpus: int, said: list[str]) -> TrainingJob:
    size = _checkpoint_bytes(row, said)
    if size is None:
        said.append("a checkpoint of 1 TB")
    degrees = {name.lower(): int(n) for name, n in re.findall(r"(TP|PP|DP|EP|CP) ?(\d+)\b(?!-)", row["parallelism"])}
    model_ranks = degrees.get("tp", 1) * degrees.get("pp", 1)
    whole = "no distributed optimizer" in _text(row) and model_ranks > 1
    writers = 1 if "rank-0" in _text(row) else model_ranks if whole else gpus
    return TrainingJob(
        step_s=_STEP_S,
        tokens_per_step=1,
        gpus=gpus,
        nodes=_nodes(row) or 1,
        replicas=degrees.get("dp", 1),
        device=row["hardware"] or "H100",
        checkpoint_bytes=size or 1e12,
        writers=min(writers, gpus),
    )


def _counts(row: Row) -> FailureCounts:
    """Return the preset that `simulate goodput` uses for a row's hardware, if not counted on the row's own job."""
    job = re.sub(r"[^a-z0-9]", "", (row["job"] + row["model"]).lower())
    return presets.failures_for(
        row["hardware"], lambda r: bool(r.family) and (r.family == row.family or r.family in job)
    )


def _failures(row: Row) -> Iterator[ScoredFigure]:
    """Yield the row's failure counts, times between failures and rates, predicted from presets of other sources."""
    counts, why = _counts(row), ["published rates differ tenfold"]
    gpus, nodes, days = row.count("gpus"), _nodes(row), row.number("days")
    said = [f"failures of {counts.name}"]

    def scored(quantity: str, published: float, predicted: float) -> ScoredFigure:
        figure = _figure(row, quantity, published, predicted, said)
        return replace(figure, why="; ".join(said + why)) if abs(figure.error) > _NEAR else figure

    stated = row.number("interruptions_unexpected")
    stated = stated if stated is not None or row["interruptions_planned"] else row.number("interruptions")
    if stated and gpus and nodes and days:
        yield scored("unexpected failures", stated, counts.per_s(gpus, nodes) * days * 86_400)
    hours, of = row.number("mttf_h"), row.count("mttf_gpus") or gpus
    if hours and of:
        yield scored("time to failure", hours, 1 / counts.per_s(of, -(-of // 8)) / 3600)
    per_node = row.number("failures_per_1000_node_days")
    if per_node:
        rate = sum(counts.rate(c, 8, 1) for c in HARDWARE)
        yield scored("node failures", per_node, rate * 86_400 * 1000)
    share, cause = row.number("share_pct"), row["cause"].lower()
    unit = re.search(r"failures? (?:a|per) (month|day|year)\b", cause)
    if share and unit:
        words: dict[str, Callable[[], float]] = {
            "gpu": lambda: counts.rate("gpu", 1, 0) + counts.rate("host", 0, 1) / 8,
            "nic": lambda: counts.rate("nic", 1, 0) + counts.rate("switch", 1, 0),
            "node": lambda: sum(counts.rate(c, 8, 1) for c in HARDWARE),
        }
        known = next((rate for word, rate in words.items() if word in cause), None)
        if known is not None and known():
            yield scored("share that fails", share, 100 * known() * 3600 * _HOURS_OF[unit[1]])


# Checkpoints: their size, how long they take, for how long they stop a training.


def _checkpoint_bytes(row: Row, said: list[str]) -> float | None:
    """Return the bytes of a row's checkpoint: as stated, else from its number of parameters; None without either."""
    if gb := row.number("checkpoint_gb"):
        return gb * 1e9
    if (count := _parameters(row)) is None:
        return None
    said.append(f"{_STATE_BYTES:g} bytes a parameter")
    return count * _STATE_BYTES


def _parameters(row: Row) -> float | None:
    if row["model"]:
        try:
            return float(lookup.model_named(row["model"])[0].parameter_count)
        except InputError:
            pass
    return _scaled(row.number("params_b"), 1e9)


def _asynchronous(text: str, row: Row) -> bool:
    return "async" in text or "flash" in text or (row.number("checkpoint_stall_s") is None and "synchron" not in text)


def _storage(row: Row, said: list[str]) -> str:
    words = row["storage"].lower()
    known = {name: name for name in ("tectonic", "gpfs", "nas", "local")} | {"nvme": "local", "nfs": "nfs-b200"}
    name = next((name for word, name in known.items() if word in words), "shared")
    families = {"tectonic": "llama3", "gpfs": "bloom", "nfs-b200": "lablup-b200"}
    if families.get(name) == row.family:
        name = "shared"
    if not row.number("storage_write_gbs"):
        said.append(f"storage {name}")
    return name


def _checkpoint(row: Row) -> Iterator[ScoredFigure]:
    """Yield a checkpoint's size, and its seconds to save, to load and of stall, each predicted without its own
    cell."""
    stated = {name: row.number(f"checkpoint_{name}") for name in ("gb", "save_s", "load_s", "stall_s")}
    if (gb := stated["gb"]) and (count := _parameters(row)) is not None:
        predicted = count * _STATE_BYTES / 1e9
        in_gib = abs(predicted * 1e9 / 2**30 / gb - 1) < 0.02
        why = "agrees to 2 % in GiB" if in_gib else f"{gb * 1e9 / count:.3g} bytes a parameter would explain it"
        yield _figure(row, "checkpoint size", gb, predicted, [f"{_STATE_BYTES:g} bytes a parameter", why])
    if not any(stated[name] for name in ("save_s", "load_s", "stall_s")):
        return
    if not (stated["gb"] or _parameters(row)):
        return
    for name, quantity in (("save_s", "save"), ("load_s", "load"), ("stall_s", "stall")):
        if (published := stated[name]) is None or published == 0:
            continue
        reasons: list[str] = []
        blank = Row({**row.cells, f"checkpoint_{name}": "", "checkpoint_interval_s": ""})
        if name == "stall_s":
            blank = Row({**blank.cells, "checkpoint_save_s": ""})
        gpus = row.count("gpus")
        if not gpus:
            reasons.append("one node of 8 GPUs")
        waits = name != "stall_s" or ("async" not in _text(row) and "flash" not in _text(row))
        p = _premise(Row({**blank.cells, "gpus": str(gpus or 8)}), [])
        assert p is not None
        _storage(row, reasons)
        predicted = p.load_s if name == "load_s" else p.save_s if waits else p.saving.stall_s
        figure = _figure(row, quantity, published, predicted, reasons)
        if abs(figure.error) > _NEAR:
            rate = p.trained.checkpoint_bytes / published / 1e9
            of = "bandwidth" if waits else "copy"
            figure = replace(figure, why="; ".join([*reasons, f"a {of} of {rate:.3g} GB/s would explain it"]))
        yield figure


def _pairs(rows: Sequence[Row], figures: Sequence[ScoredFigure]) -> Iterator[RestartPair]:
    """Yield the jobs of a source that differ in their restart, the slower kind first."""
    by = {f.row: f for f in figures if f.quantity in ("effective time", "uptime")}
    jobs = [row for row in rows if row.name in by]
    order = list(presets.RESTARTS)
    for i, a in enumerate(jobs):
        for b in jobs[i + 1 :]:
            kinds = [_restart_kind(_text(row)) for row in (a, b)]
            if a.family != b.family or a["gpus"] != b["gpus"] or kinds[0] == kinds[1]:
                continue
            slow, fast = sorted((a, b), key=lambda row: order.index(_restart_kind(_text(row))))
            one, two = by[slow.name], by[fast.name]
            yield RestartPair(
                a.family,
                f"{slow['job']}: {_restart_kind(_text(slow))}",
                f"{fast['job']}: {_restart_kind(_text(fast))}",
                (one.published, two.published),
                (one.predicted, two.predicted),
            )
