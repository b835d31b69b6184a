"""What a command line launches: the program behind its launchers, and how many ranks of it on how many nodes.

`srun -N 4 bash -c "torchrun --nproc-per-node 8 -m torchtitan.train --training.seq_len 8192"` starts 4 x 8 ranks of
torchtitan.train. The launchers are rows of programs.toml; what none of them is, is the program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from phalanx.frameworks.shell.scope import is_open, plain
from phalanx.spec.rows import Rows, record

OpenFile = Callable[[str], "str | None"]
"""The text of a file that a command names; None where it is not here."""
_PYTHON = re.compile(r"(?:.*/)?(?:python|pypy|ipython)[0-9.]*$")
_PYTHON_SWITCHES = re.compile(r"-[uOBEsSIivqbxdP]+$")
_BAG = re.compile(r"(?i)arg|opt|flag|dist|launch|torchrun|param")
"""Names of variables that hold options."""
_MOST = 10**7


@dataclass(frozen=True)
class Launcher:
    """A program that starts another: a row of programs.toml, which says what its fields are."""

    title: str
    names: tuple[str, ...]
    source: str
    subcommands: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    operands: int = 0
    counts: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that say a count where no option does."""
    python: bool = False
    itself: bool = False
    """Whether it is the program too: its options are the program's."""
    allocation: bool = False
    """Whether it starts what its batch job was given."""
    keeps_options: bool = False
    """Whether its options configure the program too."""
    node_default: int | None = None
    per_node_default: int | None = None

    def knows(self, name: str) -> bool:
        """Whether it has an option; every one where its options are not listed."""
        return not self.options or name in self.known

    @property
    def known(self) -> tuple[str, ...]:
        """Its options, where they are listed."""
        return (*self.options, *self.switches, *self.counts)

    def full_name(self, name: str) -> str:
        """Return the option that a beginning of its name means, as argparse and getopt take it."""
        near = [other for other in self.known if other.startswith(name)] if len(name) > 2 else []
        return near[0] if len(near) == 1 else name


@dataclass(frozen=True)
class Given:
    """What a batch system or an operator gives a job; None: it does not say. `by`: where it says so."""

    nodes: int | None = None
    per_node: int | None = None
    """Tasks of a node."""
    tasks: int | None = None
    gpus: int | None = None
    """Of a node."""
    all_gpus: int | None = None
    by: str = ""

    @property
    def ranks(self) -> int | None:
        """GPUs of the whole job."""
        return self.all_gpus or (self.nodes * self.gpus if self.nodes and self.gpus else None)


@dataclass(frozen=True)
class Launch:
    """A program with its words, and its ranks; None: the command leaves them open."""

    launchers: tuple[str, ...] = ()
    program: str = ""
    words: tuple[str, ...] = ()
    nodes: int | None = None
    per_node: int | None = None
    world: int | None = None
    options: Mapping[str, str | bool] = field(default_factory=dict)
    """Options of the launchers, by name."""
    counted: Mapping[str, str] = field(default_factory=dict)
    """Options that the ranks follow from -> what they count."""
    kept: Mapping[str, str | bool] = field(default_factory=dict)
    """Options of a launcher that configure the program."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Options that a launcher does not have -> the nearest name that it has, or ""."""
    config: str = ""
    """A launcher's configuration file."""
    missing: tuple[str, ...] = ()
    """Files of hosts that are not here."""
    asked: int | None = None
    """GPUs that the batch job asks for."""
    open: tuple[str, ...] = ()
    """Words that bring options of a launcher, which are not known."""


@cache
def launchers() -> Mapping[str, Launcher]:
    """Return every launcher by the names that it is called."""
    rows = Rows(Path(__file__).parent / "programs.toml", record(Launcher, "title"))
    return {name: launcher for launcher in rows.values() for name in launcher.names}


def launch(
    words: tuple[str, ...],
    environment: Mapping[str, str] | None = None,
    given: Given | None = None,
    open_file: OpenFile = lambda name: None,
) -> Launch:
    """Read a command's words, from its first launcher to its program."""
    rest, variables = list(words), dict(environment or {})
    given = given or Given()
    started = Launch()
    ranks = _Ranks(given, variables, open_file)
    while rest:
        rest = _without_assignments(rest, variables)
        word = rest[0] if rest else ""
        row = launchers().get(word.rpartition("/")[2])
        if row is not None and not (subcommand := _subcommand(row, rest)) and row.subcommands:
            row = None
        if row is not None:
            rest = rest[1 + (1 if row.subcommands and subcommand.strip() else 0) :]
            if row.itself:
                ranks.add(row, {n: v for n, v in _options(row, rest)[0].items() if n in row.counts})
                one = replace(started, launchers=(*started.launchers, row.title), program=row.names[0])
                return ranks.result(replace(one, words=tuple(rest)))
            options, rest, module = _options(row, rest)
            started = _noted(started, row, options)
            ranks.add(row, options)
            rest = rest[1:] if rest[:1] == ["--"] else rest
            operands = row.operands if row.title != "torchx" or not options.get("") else 0
            taken, rest = rest[:operands], rest[operands:]
            if row.title == "torchx":
                rest = _component(ranks, row, rest)
            elif taken == ["submit"] or (row.title == "ray_job" and taken):
                _, rest, _ = _options(row, rest)
                rest = rest[1:] if rest[:1] == ["--"] else rest
            if row.python and rest and not _PYTHON.match(rest[0]):
                if module and rest[0] in launchers():
                    continue
                return ranks.result(replace(started, program=rest[0], words=tuple(rest[1:])))
        elif _PYTHON.match(word):
            rest = _behind_python(rest[1:])
            if not rest or rest[0].rpartition("/")[2] in launchers():
                continue
            return ranks.result(replace(started, program=rest[0], words=tuple(rest[1:])))
        elif word.startswith("-"):  # the arguments alone
            return ranks.result(replace(started, words=tuple(rest)))
        else:
            return ranks.result(replace(started, program=word, words=tuple(rest[1:])))
    return ranks.result(started)


def _without_assignments(words: list[str], variables: dict[str, str]) -> list[str]:
    while words and (pair := re.match(r"([A-Za-z_]\w*)=(.*)\Z", words[0], re.S)):
        variables[pair[1]] = pair[2]
        words = words[1:]
    return words


def _subcommand(row: Launcher, words: list[str]) -> str:
    """Return the subcommand of a launcher that follows; " " where it needs none."""
    if len(words) > 1 and words[1] in row.subcommands:
        return words[1]
    return " " if "" in row.subcommands or not row.subcommands or row.names[0] != words[0] else ""


def _options(row: Launcher, words: list[str]) -> tuple[dict[str, str | bool], list[str], bool]:
    """Return a launcher's options by name, the words behind them, and whether a module follows. An open word that
    stands for options is one, by its own text."""
    options: dict[str, str | bool] = {}
    at, module = 0, False
    while at < len(words) and (_opens(row, words, at) or re.match(r"--?[^-]", words[at])):
        if is_open(words[at][:1]):
            options[plain(words[at])] = True
            at += 1
            continue
        name, equals, value = words[at].lstrip("-").partition("=")
        name = row.full_name(name.replace("-", "_"))
        attached = re.fullmatch(r"([A-Za-z])(\d+)", name)
        if equals:
            options[name] = value
        elif attached and attached[1] in row.counts:
            options[attached[1]] = attached[2]
        elif name in row.switches or at + 1 >= len(words) or _has_no_value(row, name, words[at + 1]):
            options[name] = True
            module |= name in ("m", "module")
        elif name in row.pairs:
            options[name] = " ".join(words[at + 1 : at + 3])
            at += 2
        elif words[at + 1].startswith("-") and not re.fullmatch(r"-?\d+", words[at + 1]):
            options[name] = True
        else:
            options[name] = words[at + 1]
            at += 1
        at += 1
    return options, words[at:], module


def _opens(row: Launcher, words: list[str], at: int) -> bool:
    """Whether an open word, `$DISTRIBUTED_ARGS`, stands for options of a launcher, and not for its program."""
    if not is_open(words[at][:1]) or at + 1 == len(words):
        return False
    after = words[at + 1]
    if after.startswith("-"):
        return row.full_name(after.lstrip("-").partition("=")[0].replace("-", "_")) in row.known
    return _is_program(after) or (is_open(after[:1]) and bool(_BAG.search(plain(words[at]))))


def _has_no_value(row: Launcher, name: str, after: str) -> bool:
    """Whether the word behind an option is the program, and not its value."""
    return name not in row.counts and name not in row.options and _is_program(after)


def _is_program(word: str) -> bool:
    return word.endswith(".py") or bool(_PYTHON.match(word)) or word.rpartition("/")[2] in launchers()


def _behind_python(words: list[str]) -> list[str]:
    """Return the file or module that Python runs, and its words."""
    while words and words[0].startswith("-"):
        option = words[0]
        if option in ("-m", "-c"):
            return words[1:]
        if option.startswith("-m"):
            return [option[2:], *words[1:]]
        words = words[1 if _PYTHON_SWITCHES.match(option) or option.startswith("--") else 2 :]
    return words


def _component(ranks: _Ranks, row: Launcher, words: list[str]) -> list[str]:
    """Return the program of `torchx run ... dist.ddp -j 2x8 --script train.py -- ...`, whose options count ranks."""
    options, rest, _ = _options(row, words)
    ranks.add(row, options)
    rest = rest[1:] if rest[:1] == ["--"] else rest
    program = options.get("script") or options.get("m")
    return ["python", *(("-m",) if "m" in options else ()), str(program), *rest] if program else rest


def _noted(started: Launch, row: Launcher, options: Mapping[str, str | bool]) -> Launch:
    unknown = {
        name: next(iter(get_close_matches(name, row.known, 1, 0.7)), "")
        for name in options
        if not row.knows(name) and name[:1] != "$"
    }
    return replace(
        started,
        launchers=(*started.launchers, row.title),
        options={**started.options, **{n: v for n, v in options.items() if n[:1] != "$"}},
        open=(*started.open, *(n for n in options if n[:1] == "$")),
        kept={**started.kept, **options} if row.keeps_options else started.kept,
        unknown={**started.unknown, **unknown},
        config=str(
            next((options[n] for n, what in row.counts.items() if what == "config" and n in options), started.config)
        ),
    )


class _Ranks:
    """Nodes and ranks as launchers state them, from the outermost in."""

    def __init__(self, given: Given, environment: Mapping[str, str], open_file: OpenFile) -> None:
        self.given, self.environment, self.open_file = given, environment, open_file
        self.nodes: int | None = None
        self.per_node: int | None = None
        self.world: int | None = None
        self.gpus = given.gpus
        self.counted: dict[str, str] = {}
        self.missing: list[str] = []

    def add(self, row: Launcher, options: Mapping[str, str | bool]) -> None:
        """Take what a launcher states; one that starts Python starts ranks of its own on the nodes around it."""
        stated: dict[str, str] = {}
        for name, value in options.items():
            if what := row.counts.get(name):
                stated[what] = plain(str(value)) if not is_open(str(value)) else ""
                if what in ("nodes", "per_node", "world", "grid", "include", "hosts", "hostfile", "map_by"):
                    self.counted[name] = {"per_node": "ranks of a node"}.get(what, what)
        for what, variable in row.environment.items():
            if what not in stated and variable in self.environment:
                stated[what] = self.environment[variable]
        if any(name[:1] == "$" for name in options):  # which may say any count
            stated = dict.fromkeys(row.counts.values(), "") | stated
        hosts = self._hosts(stated)
        if row.allocation:
            self._allocated(stated)
        elif row.python:
            self._started(row, stated, hosts)
        elif row.counts and row.title != "torchx":
            self.nodes = hosts[0] or self.nodes or self.given.nodes
            ppr = re.match(r"ppr:(\d+):node", stated.get("map_by", ""))
            self.per_node = _count(stated.get("per_node")) or (int(ppr[1]) if ppr else None)
            sets = _product(_count(stated.get("sets")), _count(stated.get("per_set", "1")))
            self.world = _count(stated.get("world")) or sets or _product(self.nodes, self.per_node) or hosts[1]
        elif grid := re.fullmatch(r"(?:(?:\d+:)?(\d+)x)?(\d+)", stated.get("grid", "")):
            self.nodes, self.per_node = int(grid[1] or 1), int(grid[2])
            self.world = self.nodes * self.per_node

    def _allocated(self, stated: Mapping[str, str]) -> None:
        given = self.given
        self.nodes = _count(stated.get("nodes", "").partition("-")[0]) or given.nodes
        self.gpus = _gpus(stated.get("gpus")) or self.gpus
        self.per_node = _count(stated.get("per_node")) or given.per_node
        self.world = _count(stated.get("world")) or _product(self.nodes, self.per_node) or given.tasks
        if self.world is None and "per_node" not in stated and "world" not in stated:
            self.world = self.nodes  # one task a node
        if self.world and self.nodes and self.per_node is None and self.world % self.nodes == 0:
            self.per_node = self.world // self.nodes

    def _started(self, row: Launcher, stated: Mapping[str, str], hosts: tuple[int | None, int | None]) -> None:
        around = self.nodes or self.given.nodes
        nodes = stated.get("nodes")
        elastic = re.fullmatch(r"(\d+):(\d+)", nodes or "")
        if elastic:
            self.nodes = int(elastic[2])
        elif nodes is not None:
            self.nodes = _count(nodes) or around
        else:
            self.nodes = hosts[0] or row.node_default
        written = stated.get("per_node")
        visible = _visible(self.environment.get("CUDA_VISIBLE_DEVICES", ""))
        if written in ("gpu", "auto") or (written is None and row.per_node_default is None):
            each = hosts[1] // (hosts[0] or 1) if hosts[1] else None
            self.per_node = each or visible or self.gpus
        else:
            self.per_node = row.per_node_default if written is None else _count(written) or self.gpus
        self.world = _product(self.nodes, self.per_node)
        if "world" in row.counts.values():  # it counts all ranks, or leaves them to its file
            self.world = _count(stated.get("world")) if "world" in stated else None
            self.nodes = _count(stated.get("nodes")) if "nodes" in stated else None
            self.per_node = self.world // self.nodes if self.world and self.nodes else None

    def _hosts(self, stated: Mapping[str, str]) -> tuple[int | None, int | None]:
        """Return (hosts, slots) of a list, a file or a filter of hosts."""
        if text := stated.get("include"):
            places = [part for part in text.split("@") if part]
            slots = [len(p.partition(":")[2].split(",")) if ":" in p else 0 for p in places]
            return len(places), sum(slots) if all(slots) else None
        if name := stated.get("hostfile"):
            text = self.open_file(name) or ""
            if not text:
                self.missing.append(name)
            lines = [line.split("#")[0].split() for line in text.splitlines()]
            lines = [line for line in lines if line]
            slots = [int(m[1]) if (m := re.search(r"slots=(\d{1,6})", " ".join(line))) else 0 for line in lines]
            return (len(lines), sum(slots) if all(slots) else None) if lines else (None, None)
        if text := stated.get("hosts"):
            parts = [part for part in text.split(",") if part]
            slots = [int(p.rpartition(":")[2]) if re.search(r":\d{1,6}$", p) else 1 for p in parts]
            return len(parts), sum(slots)
        return None, None

    def result(self, started: Launch) -> Launch:
        """Return a launch with its ranks; a process without a launcher has those of its own variables."""
        if not started.launchers and "RANK" in self.environment:
            self.world = _count(self.environment.get("WORLD_SIZE"))
        return replace(
            started,
            nodes=self.nodes,
            per_node=self.per_node,
            world=self.world,
            counted=self.counted,
            missing=tuple(self.missing),
        )


def _visible(text: str) -> int | None:
    """Return how many devices CUDA_VISIBLE_DEVICES has; None where it is not set or not known."""
    parts = [part for part in plain(text).split(",") if part.strip()]
    return len(parts) if parts and all(re.fullmatch(r"\s*(\d+|GPU-.+|MIG-.+)\s*", part) for part in parts) else None


def _gpus(text: str | None) -> int | None:
    """Return the number of GPUs in Slurm's words: 8, h100:8, gpu:h100:8."""
    match = re.search(r"(?:^|:|,)(\d{1,6})(?:\(|$|,)", text or "")
    return int(match[1]) if match and ("gpu" in (text or "") or ":" not in (text or "") or text) else None


def _count(text: str | None) -> int | None:
    value = int(text) if text and re.fullmatch(r"\d{1,8}", text) else 0
    return value if 0 < value <= _MOST else None


def _product(a: int | None, b: int | None) -> int | None:
    return a * b if a and b else None
