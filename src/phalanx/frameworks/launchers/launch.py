"""What a command line launches: the program behind its launchers, and how many ranks of it on how many nodes.

`srun -N 4 bash -c "torchrun --nproc-per-node 8 -m torchtitan.train --training.seq_len 8192"` starts 4 x 8 ranks of
torchtitan.train. Launchers are rows of programs.toml; the first word that names none of them is the program.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches

from phalanx.frameworks.launchers.launcher import Allocation, Launcher, OpenFile, ProgramLaunch, launchers
from phalanx.frameworks.launchers.ranks import RankCounts
from phalanx.frameworks.shell.scope import is_open, plain

_PYTHON = re.compile(r"(?:.*/)?(?:python|pypy|ipython)[0-9.]*$")
_PYTHON_SWITCHES = re.compile(r"-[uOBEsSIivqbxdP]+$")
_HOST = re.compile(r"node\d+")
"""A host as shell/ names it: `--nodelist="${NODES[@]:0:4}"` makes words of its hosts."""
_BAG = re.compile(r"(?i)arg|opt|flag|dist|launch|torchrun|param")
"""Words in the names of variables that hold options, `$DISTRIBUTED_ARGS`."""


def launch(
    words: tuple[str, ...],
    environment: Mapping[str, str] | None = None,
    given: Allocation | None = None,
    open_file: OpenFile = lambda name: None,
) -> ProgramLaunch:
    """Return what a command launches, from its first launcher to its program. `words`: expanded, open parts marked;
    `environment`: variables that are exported to it; `given`: nodes and GPUs of its batch job; `open_file`: text of a
    file of hosts by its name."""
    rest, variables = list(words), dict(environment or {})
    given = given or Allocation()
    started = ProgramLaunch()
    ranks = RankCounts(given, variables, open_file)
    while rest:
        rest = _without_assignments(rest, variables)
        word = rest[0] if rest else ""
        row = launchers().get(word.rpartition("/")[2])
        if row is not None and not (subcommand := _subcommand(row, rest)) and row.subcommands:
            row = None
        if row is not None:
            rest = rest[1 + (1 if row.subcommands and subcommand.strip() else 0) :]
            if row.handed:
                started, rest = _on_each_node(ranks, row, rest, started)
                continue
            if row.itself:
                if row.behind and "--" in rest:
                    started, rest = _with_handed_options(ranks, row, rest, started)
                else:
                    ranks.add(row, {n: v for n, v in _options(row, rest)[0].items() if n in row.counts})
                one = replace(started, launchers=(*started.launchers, row.title), program=row.names[0])
                return ranks.result(replace(one, words=(*subcommand.split(), *rest)))
            options, rest, module = _options(row, rest)
            started = _with_launcher(started, row, options)
            ranks.add(row, options)
            rest = rest[1:] if rest[:1] == ["--"] else rest
            operands = row.operands if row.title != "torchx" or not options.get("") else 0
            taken, rest = rest[:operands], rest[operands:]
            while row.title == "srun" and rest and _HOST.fullmatch(rest[0]):
                rest = rest[1:]
            if row.title == "torchx":
                rest = _component(ranks, row, rest)
            elif taken == ["submit"] or (row.title == "ray_job" and taken):
                _, rest, _ = _options(row, rest)
                rest = rest[1:] if rest[:1] == ["--"] else rest
            if row.python and rest and not _PYTHON.match(rest[0]):
                if (module or options.get("no_python")) and rest[0].rpartition("/")[2] in launchers():
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


def _on_each_node(
    ranks: RankCounts, row: Launcher, words: list[str], started: ProgramLaunch
) -> tuple[ProgramLaunch, list[str]]:
    """Take what a submitter asks for and return the last command behind its --, with accelerate's processes of a node
    times its nodes (allenai/open-instruct e6c3044a, mason.py:534)."""
    at = words.index("--") if "--" in words else len(words)
    own = dict(zip((word.lstrip("-") for word in words[:at]), [*words[1:at], ""], strict=True))
    ranks.add(row, {name: value for name, value in own.items() if name in row.counts})
    rest = words[at + 1 :]
    while "&&" in rest:
        rest = rest[rest.index("&&") + 1 :]
    place = rest.index("--num_processes") + 1 if "--num_processes" in rest[:-1] else 0
    nodes = ranks.nodes or 1
    if place and nodes > 1 and rest[place].isdigit():
        rest[place : place + 1] = [str(int(rest[place]) * nodes), "--num_machines", str(nodes)]
    return replace(started, launchers=(*started.launchers, row.title)), rest


def _without_assignments(words: list[str], variables: dict[str, str]) -> list[str]:
    while words and (pair := re.match(r"([A-Za-z_]\w*)=(.*)\Z", words[0], re.S)):
        variables[pair[1]] = pair[2]
        words = words[1:]
    return words


def _subcommand(row: Launcher, words: list[str]) -> str:
    """Return the subcommand behind a launcher; " " where none is needed, "" where one is missing."""
    if len(words) > 1 and words[1] in row.subcommands:
        return words[1]
    return " " if "" in row.subcommands or not row.subcommands or row.names[0] != words[0] else ""


def _options(row: Launcher, words: list[str]) -> tuple[dict[str, str | bool], list[str], bool]:
    """Return a launcher's options by name, the words behind them, and whether a module follows. A variable that
    brings options, `$DISTRIBUTED_ARGS`, is an option of that name."""
    options: dict[str, str | bool] = {}
    at, module = 0, False
    while at < len(words) and (_brings_options(row, words, at) or re.match(r"--?[^-]", words[at])):
        if is_open(words[at][:1]):
            options[plain(words[at])] = True
            at += 1
            continue
        name, equals, value = words[at].lstrip("-").partition("=")
        name = row.full_name(name.replace("-", "_"))
        attached = re.fullmatch(r"([A-Za-z])(\d+)", name)
        if equals:
            options[name] = value
        elif not words[at].startswith("--") and name not in row.known and set(name) <= set(row.switches):  # -lu
            options |= dict.fromkeys(name, True)
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


def _brings_options(row: Launcher, words: list[str], at: int) -> bool:
    """Whether an open word, `$DISTRIBUTED_ARGS`, brings options of a launcher rather than names its program."""
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
    """Return the file or module that Python runs, and its words; none where it runs a text (`-c`)."""
    while words and words[0].startswith("-"):
        option = words[0]
        if option.startswith("-c"):
            return []
        if option == "-m":
            return words[1:]
        if option.startswith("-m"):
            return [option[2:], *words[1:]]
        words = words[1 if _PYTHON_SWITCHES.match(option) or option.startswith("--") else 2 :]
    return words


def _component(ranks: RankCounts, row: Launcher, words: list[str]) -> list[str]:
    """Return the program of `torchx run ... dist.ddp -j 2x8 --script train.py -- ...`, whose options count ranks."""
    options, rest, _ = _options(row, words)
    ranks.add(row, options)
    rest = rest[1:] if rest[:1] == ["--"] else rest
    program = options.get("script") or options.get("m")
    return ["python", *(("-m",) if "m" in options else ()), str(program), *rest] if program else rest


def _with_handed_options(
    ranks: RankCounts, row: Launcher, words: list[str], started: ProgramLaunch
) -> tuple[ProgramLaunch, list[str]]:
    """Return the launch with the launcher that a program starts its ranks by (`row.behind` names it), and the words
    of the program itself. That launcher's options are those behind `--`."""
    at = words.index("--")
    own, theirs = words[:at], words[at + 1 :]
    place = next((i for i, word in enumerate(own) if word.lstrip("-").partition("=")[0] == row.behind), None)
    named = "" if place is None else own[place].partition("=")[2] or "".join(own[place + 1 : place + 2])
    inner = launchers().get(named or "accelerate", row)
    options, _, _ = _options(inner, theirs)
    ranks.add(inner, options)
    if place is not None:
        own = own[:place] + own[place + (1 if "=" in own[place] else 2) :]
    return _with_launcher(started, inner, options), own


def _with_launcher(started: ProgramLaunch, row: Launcher, options: Mapping[str, str | bool]) -> ProgramLaunch:
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
