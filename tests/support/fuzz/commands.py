"""Every command line: valid ones, and the same with wrong values, unknown options and files with mistakes in them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from support.fuzz import configurations, evidence, files, listings, trained
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


Line = tuple[tuple[str, ...], Options]
"""A valid command line: words that stay, and options with their values."""


def _line(text: str) -> Line:
    fixed, _, rest = text.partition(" | ")
    words, options = rest.split(), Options()
    for word, after in zip_longest(words, words[1:], fillvalue="--"):
        if word.startswith("--"):
            options[word] = None if after.startswith("--") else after
    return tuple(fixed.split()), options


_DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_name("lines.toml").read_text())
QUICK: tuple[Line, ...] = tuple(map(_line, _DATA["quick"]))
"""Commands that take a moment."""
SLOW: tuple[Line, ...] = tuple(map(_line, _DATA["slow"]))
"""Commands that search, or start ranks."""


def lines() -> st.SearchStrategy[str]:
    """A strategy, most often one that is not legal."""
    one = st.tuples(st.sampled_from(_DATA["strategy_fields"]), st.sampled_from(_DATA["strategy_values"]) | _counts())
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
        one = st.tuples(st.sampled_from(_DATA["set"]), _counts() | free | st.just("[1,2]") | st.just("{a=1}"))
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
def command_lines(draw: st.DrawFn, pool: tuple[Line, ...]) -> Case:
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


def _readers(kind: str, pool_is_quick: bool) -> list[str]:
    quick, slow = dict(_DATA["reader_quick"]), dict(_DATA["reader_slow"])
    question = "--cluster dgx-h100 --gpus 16"
    for name, file in _CONFIGURATION.items():
        is_kind = f" --kind {name}" if name in configurations.KINDS else ""
        priced = f"predict {file} {question} --batch 64 --seq 2048 --model llama2-7b --json"
        reads = [f"read {file}{more}" for more in (" --json", " --gpus 16", is_kind)]
        quick[f"{name} configuration"] = [*reads, priced, f"lint {file} --gpus 16"]
        plan = f"plan --from {file} {question} --out y.json --json"
        slow[f"{name} configuration"] = [plan, f"compare {file} tp=2 {question}"]
    return quick[kind] if pool_is_quick else [*quick.get(kind, ()), *slow.get(kind, ())]


_CONFIGURATION = {
    **dict.fromkeys(("deepspeed", "hf"), "c.json"),
    **dict.fromkeys(("nanotron", "maxtext", "nemo", "accelerate", "YAML"), "c.yaml"),
    **{"torchtitan": "c.toml", "megatron": "c.yaml", "script": "c.sh", "Python": "c.py"},
    **{"started": "c.txt", "manifest": "c.yaml"},
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
        "trace": (st.just(evidence.trace()), files.as_json, "k.json"),
        "snapshot": (st.just(evidence.SNAPSHOT), files.as_json, "k.json"),
        "calibration": (st.just(evidence.CALIBRATION), files.as_toml, "k.toml"),
        "checks": (st.just(evidence.CHECKS), files.as_toml, "k.toml"),
    }
    for name in configurations.KINDS:
        write = files.as_toml if name == "torchtitan" else files.as_json
        trees[f"{name} configuration"] = (configurations.trees(name), write, _CONFIGURATION[name])
    trees["manifest configuration"] = (st.sampled_from(configurations.MANIFESTS), files.as_json, "c.yaml")
    texts = {
        "schedule": ((files.SCHEDULE,), "s.csv"),
        "measured runs": ((files.RUNS,), "r.csv"),
        "nccl-tests": ((files.NCCL,), "n.txt"),
        "topology": (
            (
                *(listings.TOPOLOGY, listings.IBNETDISCOVER, listings.TOPO, listings.SCONTROL),
                *(listings.TREE_YAML, listings.NCCL_XML, listings.ROCM),
            ),
            "t.conf",
        ),
        "jobs": ((listings.JOBS,), "t.csv"),
        "served runs": ((listings.SERVED,), "v.csv"),
        "step log": ((evidence.LOG, evidence.TITAN), "k.log"),
        "NCCL's log": ((evidence.NCCL_LOG, evidence.INSPECTOR), "k.log"),
        "steps": ((evidence.STEPS,), "k.csv"),
        "failures": ((evidence.FAILURES,), "k.csv"),
        "lengths": ((evidence.LENGTHS,), "k.txt"),
        "metrics": ((listings.METRICS,), "runs/f/metrics.jsonl"),
        "script configuration": ((configurations.SCRIPT,), "c.sh"),
        "started configuration": (configurations.STARTED, "c.txt"),
        "YAML configuration": ((configurations.YAML,), "c.yaml"),
        "Python configuration": ((configurations.PYTHON,), "c.py"),
        "serving script": (configurations.SERVED, "v.sh"),
    }
    if not quick:
        texts["requests"] = ((listings.REQUESTS,), "q.csv")
    often = ("cluster file", "config.json", "job file", "plan.json") * 3
    often += ("script configuration", "YAML configuration", "started configuration", "manifest configuration")
    kind = draw(st.sampled_from(often + tuple(texts) + tuple(trees)))
    if kind in texts:
        valid, name = texts[kind]
        content = draw(st.sampled_from(valid))
        for _ in range(draw(st.integers(1, 2))):
            how = files.damaged(content) | files.reworded(content)
            if content in (
                configurations.SCRIPT,
                configurations.YAML,
                configurations.PYTHON,
                *configurations.STARTED,
                *configurations.SERVED,
            ):
                how = how | configurations.hostile(content) | configurations.hostile(content)
            content = draw(how)
    else:
        tree, write, name = trees[kind]
        content = write(draw(tree.flatmap(files.mistaken)))
        if draw(st.integers(0, 7)) == 0:
            content = draw(files.damaged(content))
    return Case(kind, tuple(draw(st.sampled_from(_readers(kind, quick))).split()), {name: content})


@st.composite
def run_cases(draw: st.DrawFn, run: trained.Run) -> Case:
    """A run whose checkpoint or weights have mistakes, given to a command that reads them."""
    kind, lines, changed = draw(
        st.sampled_from(
            (
                ("checkpoint", trained.CHECKPOINT_READERS, trained.checkpoints),
                ("weights", trained.WEIGHTS_READERS, trained.weights),
            )
        )
    )
    return Case(kind, tuple(draw(st.sampled_from(lines)).split()), draw(changed(run)))


def cases(plans: tuple[Any, ...], run: trained.Run | None, quick: bool) -> st.SearchStrategy[Case]:
    """Any case. `quick`: only commands that take a moment; `run`: what the folder's run left."""
    lines_of = command_lines(QUICK if quick else QUICK * 3 + SLOW)
    tools = evidence.calls().map(lambda words: Case("tool call", words))
    kinds = [lines_of, file_cases(plans, quick)] * 5 + [tools] + ([run_cases(run)] if run else [])
    return st.sampled_from(kinds).flatmap(lambda chosen: chosen)
