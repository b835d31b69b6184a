"""Every command line: valid ones, and the same with wrong values, unknown options and files with mistakes in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from support.fuzz import configurations, files, listings, trained
from support.fuzz.leaves import WORDS

Options = dict[str, str | None]  # None: a flag


@dataclass(frozen=True)
class Case:
    """A command line, and the files that it is about."""

    kind: str
    """What is drawn with mistakes: `command line`, or the kind of file."""
    words: tuple[str, ...]
    """After `phalanx`."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents by name, beside those that the folder has."""

    def __str__(self) -> str:
        shown = {
            name: content if len(content) < 3000 else content[:200] + b"..." for name, content in self.files.items()
        }
        return f"phalanx {list(map(_short, self.words))} {shown}"


def _short(word: str) -> str:
    return word if len(word) < 200 else f"{word[:20]}... ({len(word)} characters)"


_ASKED: Options = {"--model": "llama2-7b", "--cluster": "dgx-h100", "--gpus": "16", "--batch": "64", "--seq": "2048"}
_SERVED: Options = {
    "--model": "llama2-7b",
    "--cluster": "dgx-h100",
    "--gpus": "4",
    "--input": "1000",
    "--output": "100",
    "--out": "s.json",
}
_TRACED: Options = {name: value for name, value in _SERVED.items() if name not in ("--input", "--output")}
_LINE: Options = {"--strategy": "tp=4,pp=2,zero=1"}
_SHOWN: Options = {"--ranks": "4", "--micro-batches": "8"}
_PRICED: Options = {"--costs": "1,1,1", "--transfer": "0.1"}

QUICK: tuple[tuple[tuple[str, ...], Options], ...] = (
    (("predict",), {**_ASKED, **_LINE, "--stack": "megatron-core", "--precision": "bf16", "--json": None}),
    (("predict",), {**_ASKED, "--strategy": "tp=2,cp=2,zero=1,micro_batch=2", "--explain": None}),
    (("explain",), {**_ASKED, **_LINE, "--json": None}),
    (("lint",), {**_ASKED, **_LINE, "--json": None}),
    (
        (
            "tables",
            "comm",
        ),
        {**_ASKED, **_LINE, "--json": None},
    ),
    (
        (
            "tables",
            "comm",
        ),
        {"--params": "7B", "--rate": "25", "--csv": None},
    ),
    (
        (
            "tables",
            "roofline",
        ),
        {**_ASKED, **_LINE, "--json": None},
    ),
    (("learn", "draw", "moe-layer"), {"--model": "mixtral-8x7b", "--ranks": "4", "--seq": "2048"}),
    (("learn", "draw", "fsdp"), {"--model": "llama2-7b", "--cluster": "dgx-h100", "--gpus": "16", "--json": None}),
    (("learn", "draw", "parameter-bytes"), {"--params": "7B", "--ranks": "8", "--json": None}),
    (
        (
            "tables",
            "roofline",
        ),
        {"--params": "7B", "--cluster": "dgx-a100", "--seq": "2048"},
    ),
    (
        (
            "tables",
            "memory",
        ),
        {"--model": "llama2-7b", "--card": "80", "--micro-batch": "1", "--seq": "2048", "--json": None},
    ),
    (
        (
            "tables",
            "memory",
        ),
        {"--params": "7B", "--bytes-per-parameter": "16", "--csv": None},
    ),
    (
        (
            "tables",
            "scaling",
        ),
        {"--params": "7B", "--tokens": "300B", "--tflops": "150", "--gpus": "64,128", "--json": None},
    ),
    (("serve", "memory"), {"--model": "llama2-7b", "--weights": "fp8", "--kv": "bf16", "--json": None}),
    (("serve", "roofline"), {"--model": "llama2-7b", "--cluster": "dgx-h100", "--seq": "2048"}),
    (("serve", "comm"), {"--model": "mixtral-8x7b", "--gpus": "8", "--seq": "2048", "--json": None}),
    (
        (
            "presets",
            "models",
        ),
        {"--json": None},
    ),
    (("presets", "models", "llama3-8b"), {"--json": None}),
    (("presets", "clusters", "dgx-h100"), {"--nodes": "4", "--json": None}),
    (("collectives", "show", "ring"), {"--op": "all_reduce", "--ranks": "4", "--root": "0"}),
    (("collectives", "show", "binomial"), {"--op": "broadcast", "--ranks": "5", "--root": "2"}),
    (
        ("collectives", "table"),
        {"--op": "all_reduce", "--bytes": "100MB", "--ranks": "8", "--cluster": "dgx-h100", "--json": None},
    ),
    (("pipeline", "show", "1f1b"), {**_SHOWN, **_PRICED}),
    (("pipeline", "show", "interleaved"), {**_SHOWN, "--virtual": "2", "--json": None}),
    (("pipeline", "table"), {**_SHOWN, **_PRICED, "--virtual": "2", "--json": None}),
    (("pipeline", "prove", "zb-v"), dict(_SHOWN)),
    (("pipeline", "csv", "zb-h1"), {**_SHOWN, "--sends": None}),
    (("mesh",), {"--strategy": "tp=4,pp=2,dp=2", "--cluster": "dgx-h100", "--rank": "3", "--json": None}),
    (("mesh", "groups"), {"--strategy": "tp=4,pp=2,dp=2", "--cluster": "dgx-h100", "--axis": "tp"}),
    (("mesh",), {"--strategy": "tp=4,dp=2", "--cluster": "dgx-a100", "--cube": None}),
    (("plan", "job.toml"), {"--strategy": "dp=2,zero=1", "--choices": None, "--set": "cluster.file=cluster.toml"}),
    (("plan", "job.toml"), {"--set": "job.global_batch=16", "--out": "p.json", "--json": None}),
    (("explain", "plan.json"), {"--strategy": "dp=2,zero=2", "--gpus": "2", "--json": None}),
    (("lint", "plan.json"), {"--strategy": "dp=2", "--json": None}),
    (("measure", "nccl-tests", "nccl.txt"), {"--preset": "dgx-h100", "--op": "all_reduce", "--json": None}),
    (("validate",), {"--runs": "runs.csv", "--rows": "own", "--json": None}),
    (("verify", "job.toml"), {"--strategy": "dp=2,zero=1", "--json": None}),
    (
        ("cluster", "place", "m.json"),
        {"--free": "free.json", "--no-search": None, "--for": "slurm", "--out": "p", "--json": None},
    ),
    (("cluster", "place", "m.json"), {"--free": "free.json", "--no-search": None, "--topology": "topology.conf"}),
    (
        ("cluster", "simulate"),
        {
            **{"--trace": "jobs.csv", "--cluster": "4x8", "--policy": "easy", "--placement": "topology"},
            **{"--leaf": "2", "--preempt": None, "--restart-s": "60", "--json": None},
        },
    ),
    (
        ("cluster", "simulate"),
        {
            **{"--trace": "jobs.csv", "--cluster": "dgx-h100", "--nodes": "4", "--elastic": None},
            **{"--leaf": "2", "--oversubscription": "2"},
        },
    ),
    (
        ("cluster", "read", "topology.conf"),
        {"--like": "dgx-h100", "--out": "read.toml", "--slurm": "read.conf", "--json": None},
    ),
    (("cluster", "read", "topo.txt"), {"--device": "H100", "--nodes": "2", "--port-gbit": "400", "--out": "r.toml"}),
    (("read", "run.sh"), {"--gpus": "16", "--json": None}),
    (("read", "fsdp.yaml"), {"--kind": "accelerate"}),
    (("predict", "run.sh"), {"--cluster": "dgx-h100", "--gpus": "16", "--json": None}),
    (("export", "m.json"), {"--to": "megatron", "--out": "exported", "--launcher": "slurm", "--json": None}),
    (("compare", "m.json", "tp=4"), {"--stack": "megatron-core", "--report": "c.html", "--json": None}),
    (("explain", "observed.json"), {"--cluster": "dgx-h100", "--json": None}),
    (("lint", "observed.json"), {"--cluster": "dgx-h100"}),
    (("serve", "launch", "serving.json"), {"--for": "engine", "--json": None}),
    (("report", "experts", "runs/e"), {"--json": None}),
    (("report", "runs/e"), {"--out": "page.html"}),
    (("serve", "validate"), {"--runs": "served.csv", "--json": None}),
)
"""Commands that take a moment: words, and options with values that are right."""

SLOW: tuple[tuple[tuple[str, ...], Options], ...] = (
    (
        ("plan",),
        {
            **_ASKED,
            "--tokens": "300B",
            "--price": "2.5",
            "--objective": "throughput",
            "--out": "p.json",
            "--report": "p.html",
            "--json": None,
        },
    ),
    (
        ("serve", "plan"),
        {**_SERVED, "--ttft": "1s", "--tpot": "30ms", "--price": "2.5", "--json": None},
    ),
    (
        ("serve", "plan"),
        {**_SERVED, "--engine": "sglang", "--rate": "3", "--percentile": "99", "--speculate": "3:0.7"},
    ),
    (
        ("serve", "plan"),
        {**_SERVED, "--objective": "latency", "--concurrency": "8", "--layout": "tp=2", "--reuse": "0.5"},
    ),
    (
        ("serve", "plan"),
        {**_SERVED, "--variation": "0.5", "--adapters": "8:2", "--weights": "fp8", "--launch": "engine"},
    ),
    (
        (
            "tables",
            "scaling",
        ),
        {"--model": "llama2-7b", "--gpus": "16,32", "--batch": "64", "--seq": "2048", "--json": None},
    ),
    (("train", "local.toml"), {"--strategy": "dp=2,zero=1", "--set": "train.steps=4", "--json": None}),
    (("train", "--resume"), {"--set": "train.steps=6", "--max-restarts": "1", "--json": None}),
    (("parity", "job.toml"), {"--strategy": "dp=2", "--steps": "1", "--dtype": "float64", "--json": None}),
    (
        ("generate", "runs/job"),
        {"--prompt": "the", "--tokens": "4", "--temperature": "0.8", "--top-k": "5", "--top-p": "0.9", "--page": "4"},
    ),
    (("weights", "export", "runs/job"), {"--out": "hf2", "--dtype": "float32", "--step": "5", "--shard-size": "1MB"}),
    (("weights", "import", "hf"), {"--name": "imported", "--json": None}),
    (
        ("learn", "cases"),
        {"--rules": None, "--json": None},
    ),
    (("collectives", "prove"), {"--max-ranks": "5", "--json": None}),
    (("plan", "job.toml"), {"--set": "cluster.ranks=3", "--json": None}),
    (("plan",), {"--from": "run.sh", "--cluster": "dgx-h100", "--gpus": "16", "--json": None}),
    (
        ("cluster", "place", "m.json"),
        {"--free": "free.json", "--for": "torchrun", "--out": "p", "--stack": "megatron-core"},
    ),
    # Without --runs it is valid, and scores every published choice: longer than a case may take (rule.py).
    (("validate", "choices", "--runs", "runs.csv"), {"--json": None}),
    (
        ("serve", "plan"),
        {**_TRACED, "--trace": "requests.csv", "--requests": "60", "--json": None},
    ),
    (
        ("observe", "--", "python", "program.py"),
        {"--world": "4", "--ranks": "0,1", "--mesh": "dp=4", "--node": "4", "--step": "2", "--json": None},
    ),
    # Valid but for its text: it trains every family, which is longer than a case may take.
    (("train", "sweep", "local.toml"), {"--steps": "3", "--set": "train.data=none.txt", "--json": None}),
)
"""Commands that search, or start ranks."""

_STRATEGY_FIELDS = [
    "dp",
    "zero",
    "shard",
    "tp",
    "sp",
    "cp",
    "ulysses",
    "ep",
    "etp",
    "pp",
    "virtual",
    "schedule",
    "layers",
    "micro_batch",
    "recompute",
    "compression",
    "grad_sync",
    "reshard",
    "bucket",
    "prefetch",
    "order",
]
_STRATEGY_VALUES = [
    "0",
    "1",
    "2",
    "3",
    "4",
    "8",
    "-1",
    "99",
    "0.5",
    "nan",
    "1e9",
    "auto",
    "none",
    "full",
    "selective",
    "every:2",
    "every:99",
    "topk:0.01",
    "int8",
    "powersgd:4",
    "1f1b",
    "gpipe",
    "naive",
    "interleaved",
    "zb-h1",
    "zb-v",
    "dualpipe-v",
    "step",
    "micro",
    "action",
    "2/2",
    "1/1",
    "16/16",
    "pp/dp/cp/tp",
    "tp/cp/dp/pp",
    "true",
]
_SETS = [
    "model.layers",
    "model.hidden",
    "model.heads",
    "model.kv_heads",
    "model.vocab",
    "model.norm_eps",
    "job.global_batch",
    "job.seq",
    "job.clip",
    "cluster.nodes",
    "cluster.preset",
    "cluster.ranks",
    "train.lr",
    "train.steps",
    "train.name",
    "train.seed",
    "strategy.dp",
    "strategy.bucket",
    "train.timeout_s",
    "train.threads",
    "job.optimizer.betas",
    "job.precision.compute",
    "model.experts",
    "model.window",
]


def lines() -> st.SearchStrategy[str]:
    """A strategy, most often one that is not legal."""
    one = st.tuples(st.sampled_from(_STRATEGY_FIELDS), st.sampled_from(_STRATEGY_VALUES) | _counts())
    return st.lists(one.map("=".join), min_size=1, max_size=4).map(",".join)


def _counts() -> st.SearchStrategy[str]:
    big = st.sampled_from((10**5, 10**6, 10**7, 99999999999999, 2**63, 2**70, 10**400)).map(str)
    return st.integers(-3, 130).map(str) | big


def _values(option: str, before: str) -> st.SearchStrategy[str]:
    """Values of an option that may be wrong."""
    free = st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    if option == "--strategy":
        return lines() | lines() | free
    if option == "--set":
        one = st.tuples(st.sampled_from(_SETS), _counts() | free | st.just("[1,2]") | st.just("{a=1}"))
        return one.map("=".join) | free
    if before.replace(",", "").replace(".", "").isdigit():
        return _counts() | st.floats().map(str) | free
    return free | st.sampled_from(("local", "llama2-7", "dgx-h10", "cluster.toml", "config.json", "plan.json", "."))


def before_program(words: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    """Put options behind the words of a line, but before the program that it runs."""
    at = words.index("--") if "--" in words else len(words)
    return (*words[:at], *options, *words[at:])


def flat(options: Options) -> list[str]:
    """Return options as the words of a command line."""
    return [word for name, value in options.items() for word in ((name,) if value is None else (name, value))]


@st.composite
def command_lines(draw: st.DrawFn, pool: tuple[tuple[tuple[str, ...], Options], ...]) -> Case:
    """A valid command line with one or two mistakes, or none."""
    positional, options = draw(st.sampled_from(pool))
    words, given = list(positional), dict(options)
    extra: list[str] = []
    for _ in range(draw(st.sampled_from((0, 1, 1, 1, 1, 2, 2)))):
        how = draw(st.sampled_from(("value",) * 12 + ("drop", "unknown", "argument", "end", "twice")))
        valued = [name for name, value in given.items() if value is not None]
        if how == "value" and valued:
            name = draw(st.sampled_from(valued))
            given[name] = draw(_values(name, str(options[name])))
        elif how == "drop" and given:
            del given[draw(st.sampled_from(sorted(given)))]
        elif how == "unknown":
            extra.append(draw(st.sampled_from(("--modle", "-x", "--json=1", "--gpus=", "extra", "--", "--help", ""))))
        elif how == "argument" and len(words) > 1:
            words[-1] = draw(_values("", words[-1]))
        elif how == "end" and valued:
            extra.append(draw(st.sampled_from(valued)))
        elif valued:
            name = draw(st.sampled_from(valued))
            extra += [name, draw(_values(name, str(options[name])))]
    at = words.index("--") if "--" in words else len(words)
    given_words = flat(given)
    # No program's arguments can hold a NUL: the system refuses them.
    return Case("command line", tuple(w.replace("\0", "") for w in (*words[:at], *given_words, *extra, *words[at:])))


def _readers(kind: str, pool_is_quick: bool) -> tuple[tuple[str, ...], ...]:
    asked = ("--cluster", "c.toml", "--gpus", "16", "--batch", "64", "--seq", "2048")
    line = ("--strategy", "tp=4,pp=2,zero=1")
    small = ("--cluster", "dgx-h100", "--gpus", "8", "--batch", "64", "--seq", "32", "--strategy", "dp=4,tp=2")
    quick: dict[str, tuple[tuple[str, ...], ...]] = {
        "cluster file": (
            ("predict", "--model", "llama2-7b", *asked, *line, "--json"),
            ("explain", "--model", "llama2-7b", *asked, *line, "--json"),
            ("tables", "comm", "--model", "llama2-7b", *asked, *line, "--json"),
            ("collectives", "table", "--cluster", "c.toml", "--ranks", "8", "--json"),
            ("plan", "job.toml", "--set", "cluster.file=c.toml", "--strategy", "dp=2", "--json"),
        ),
        "config.json": (
            ("presets", "models", "config.json", "--json"),
            ("predict", "--model", "config.json", *small, "--json"),
            ("tables", "memory", "--model", "config.json", "--json"),
            ("lint", "--model", "config.json", *small, "--json"),
        ),
        "job file": (
            ("plan", "j.toml", "--json"),
            ("plan", "j.toml"),
            ("verify", "j.toml", "--json"),
        ),
        "plan.json": (
            ("explain", "p.json", "--json"),
            ("lint", "p.json", "--json"),
            ("tables", "comm", "p.json", "--json"),
            ("verify", "p.json", "--json"),
        ),
        "schedule": (
            ("pipeline", "show", "s.csv", "--json"),
            ("pipeline", "show", "s.csv"),
            ("pipeline", "prove", "s.csv", "--slots"),
            ("pipeline", "csv", "s.csv"),
        ),
        "measured runs": (("validate", "--runs", "r.csv", "--json"),),
        "nccl-tests": (("measure", "nccl-tests", "n.txt", "--json"),),
        "free GPUs": (
            ("cluster", "place", "m.json", "--free", "f.json", "--no-search", "--json"),
            ("cluster", "place", "m.json", "--free", "f.json", "--no-search", "--for", "slurm", "--out", "q"),
        ),
        "topology": (
            ("cluster", "read", "t.conf", "--like", "dgx-h100", "--out", "r.toml", "--slurm", "r.conf", "--json"),
            ("cluster", "read", "t.conf", "--device", "H100", "--nodes", "2", "--port-gbit", "400", "--json"),
            ("cluster", "place", "m.json", "--free", "free.json", "--topology", "t.conf", "--no-search"),
        ),
        "jobs": (
            ("cluster", "simulate", "--trace", "t.csv", "--cluster", "4x8", "--json"),
            ("cluster", "simulate", "--trace", "t.csv", "--cluster", "4x8", "--elastic", "--skip-bad"),
        ),
        "observed.json": (
            ("explain", "o.json", "--cluster", "dgx-h100", "--json"),
            ("lint", "o.json", "--cluster", "dgx-h100", "--json"),
            ("tables", "comm", "o.json", "--cluster", "dgx-h100"),
            ("compare", "o.json", "m.json", "--json"),
        ),
        "serving.json": (
            ("serve", "launch", "v.json", "--for", "engine", "--json"),
            ("serve", "launch", "v.json", "--for", "dynamo"),
        ),
        "served runs": (("serve", "validate", "--runs", "v.csv", "--json"),),
        "metrics": (
            ("report", "experts", "runs/f", "--json"),
            ("report", "experts", "runs/f"),
            ("report", "runs/f", "--out", "page.html"),
        ),
        "timeline": (("report", "runs/g", "--out", "page.html"),),
        "record": (("report", "runs/g", "--out", "page.html"),),
    }
    priced = ("--cluster", "dgx-h100", "--gpus", "16", "--batch", "64", "--seq", "2048", "--model", "llama2-7b")
    for name in (*configurations.KINDS, "script", "YAML", "Python"):
        file = _CONFIGURATION[name]
        quick[f"{name} configuration"] = (
            ("read", file, "--json"),
            ("read", file, "--gpus", "16"),
            ("read", file, *(() if name in ("script", "YAML", "Python") else ("--kind", name))),
            ("predict", file, *priced, "--json"),
            ("lint", file, "--gpus", "16"),
        )
    slow = {"job file": (("train", "j.toml", "--json"), ("parity", "j.toml", "--steps", "1", "--json"))}
    slow |= {"plan.json": (("train", "p.json", "--json"), ("export", "p.json", "--to", "megatron", "--out", "x"))}
    slow |= {"requests": (("serve", "plan", *flat(_TRACED), "--trace", "q.csv", "--requests", "60", "--json"),)}
    for name, file in _CONFIGURATION.items():
        line = ("plan", "--from", file, "--cluster", "dgx-h100", "--gpus", "16", "--out", "y.json", "--json")
        slow[f"{name} configuration"] = (line, ("compare", file, "tp=2", "--cluster", "dgx-h100", "--gpus", "16"))
    return quick[kind] if pool_is_quick else (*quick.get(kind, ()), *slow.get(kind, ()))


_CONFIGURATION = {
    **dict.fromkeys(("deepspeed", "hf"), "c.json"),
    **dict.fromkeys(("nanotron", "maxtext", "nemo", "accelerate", "YAML"), "c.yaml"),
    **{"torchtitan": "c.toml", "megatron": "c.yaml", "script": "c.sh", "Python": "c.py"},
}
"""The file in which a kind of configuration comes."""


@st.composite
def file_cases(draw: st.DrawFn, plans: tuple[Any, ...], quick: bool) -> Case:
    """A file with mistakes, given to a command that reads its kind. `plans`: valid contents of a plan.json."""
    trees = {
        "cluster file": (files.clusters(), files.as_toml, "c.toml"),
        "config.json": (files.configs(), files.as_json, "config.json"),
        "job file": (files.jobs(), files.as_toml, "j.toml"),
        "plan.json": (st.sampled_from(plans), files.as_json, "p.json"),
    }
    trees |= {
        "free GPUs": (st.just(listings.FREE), files.as_json, "f.json"),
        "observed.json": (st.just(listings.observation()), files.as_json, "o.json"),
        "serving.json": (st.sampled_from(listings.serving_plan()), files.as_json, "v.json"),
        "timeline": (st.just(listings.TIMELINE), files.as_json, "runs/g/trace.json"),
        "record": (st.just(listings.RECORD), files.as_json, "runs/g/recorded.json"),
    }
    for name in configurations.KINDS:
        write = files.as_toml if name == "torchtitan" else files.as_json
        trees[f"{name} configuration"] = (configurations.trees(name), write, _CONFIGURATION[name])
    texts = {
        "schedule": ((files.SCHEDULE,), "s.csv"),
        "measured runs": ((files.RUNS,), "r.csv"),
        "nccl-tests": ((files.NCCL,), "n.txt"),
        "topology": ((listings.TOPOLOGY, listings.IBNETDISCOVER, listings.TOPO), "t.conf"),
        "jobs": ((listings.JOBS,), "t.csv"),
        "served runs": ((listings.SERVED,), "v.csv"),
        "metrics": ((listings.METRICS,), "runs/f/metrics.jsonl"),
        "script configuration": ((configurations.SCRIPT,), "c.sh"),
        "YAML configuration": ((configurations.YAML,), "c.yaml"),
        "Python configuration": ((configurations.PYTHON,), "c.py"),
    }
    if not quick:
        texts["requests"] = ((listings.REQUESTS,), "q.csv")
    often = ("cluster file", "config.json", "job file", "plan.json") * 3 + (
        "script configuration",
        "YAML configuration",
    )
    kind = draw(st.sampled_from(often + tuple(texts) + tuple(trees)))
    if kind in texts:
        valid, name = texts[kind]
        content = draw(st.sampled_from(valid))
        for _ in range(draw(st.integers(1, 2))):
            how = files.damaged(content) | files.reworded(content)
            if content in (configurations.SCRIPT, configurations.YAML, configurations.PYTHON):
                how = how | configurations.hostile(content) | configurations.hostile(content)
            content = draw(how)
    else:
        tree, write, name = trees[kind]
        content = write(draw(tree.flatmap(files.mistaken)))
        if draw(st.integers(0, 7)) == 0:
            content = draw(files.damaged(content))
    return Case(kind, draw(st.sampled_from(_readers(kind, quick))), {name: content})


@st.composite
def run_cases(draw: st.DrawFn, run: trained.Run) -> Case:
    """A run whose checkpoint or weights have mistakes, given to a command that reads them."""
    if draw(st.booleans()):
        return Case("checkpoint", draw(trained.checkpoint_readers()), draw(trained.checkpoints(run)))
    return Case("weights", draw(trained.weights_readers()), draw(trained.weights(run)))


def cases(plans: tuple[Any, ...], run: trained.Run | None, quick: bool) -> st.SearchStrategy[Case]:
    """Any case. `quick`: only commands that take a moment; `run`: what the folder's run left."""
    lines_of = command_lines(QUICK if quick else QUICK * 3 + SLOW)
    kinds = [lines_of, file_cases(plans, quick)] * 5 + ([run_cases(run)] if run else [])
    return st.sampled_from(kinds).flatmap(lambda chosen: chosen)
