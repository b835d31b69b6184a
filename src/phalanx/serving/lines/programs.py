"""The servers and benchmarks that a script starts: each line with its program, its flags and their effects.

Programs are rows of programs.toml; the effects of their flags are in verdicts/*.toml. Launchers, environments and
containers before a program are skipped. Nothing is run.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from phalanx.frameworks import verdicts
from phalanx.frameworks.companions import Companions
from phalanx.frameworks.launchers.started import arguments, without_open_flags
from phalanx.frameworks.shell.scope import is_open, plain
from phalanx.frameworks.shell.script import follow
from phalanx.frameworks.verdicts import Verdict
from phalanx.serving.lines.files import ServerPods, under_config
from phalanx.serving.lines.guidellm import plain_flags
from phalanx.spec.errors import InputError
from phalanx.spec.rows import Rows, record

_ROOT = Path(__file__).parent
_PLACES = re.compile(r"--?(node.rank|port|host|master|dist.init|data.parallel.(address|start|rank))")
"""Flags in which the parts of one server differ."""
_ACTIONS = frozenset(("serve", "profile"))
"""Optional words after a program's name."""


@dataclass(frozen=True)
class Program:
    """A row of programs.toml, which documents the fields."""

    title: str
    role: Literal["server", "benchmark", "both", "lengths", "unread"]
    names: tuple[str, ...]
    verdicts: tuple[str, ...]
    source: str
    flags: Mapping[str, str]
    engine: str = ""
    words: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    also: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    synthetic: tuple[str, ...] = ()
    """Data sets whose lengths are in the command line."""
    of_file: str = ""
    """The data set that a file without its name is taken as; "": the default."""
    mean_lengths: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Published data set -> mean tokens (of a prompt, of an answer), as the program draws them."""

    def verdict(self, name: str) -> Verdict | None:
        """Return the effect of a flag; None: not judged."""
        judged = (table[name] for table in map(_verdicts, self.verdicts) if name in table)
        return next((verdict for verdict in judged if verdict.effect), None)

    @property
    def known(self) -> frozenset[str]:
        """The names of all judged flags, with their other names."""
        return frozenset((*self.also, *(name for table in self.verdicts for name in _verdicts(table))))

    def full_name(self, name: str) -> str:
        """Return the first name of a flag, of another name or an unambiguous beginning."""
        plain_name = name.replace("-", "_").partition(".")[0]
        name = self.also.get(plain_name, plain_name)
        if name in self.known:
            return name
        longer = {self.also.get(other, other) for other in self.known if len(name) > 2 and other.startswith(name)}
        return longer.pop() if len(longer) == 1 else name


@dataclass(frozen=True)
class Line:
    """The start of a server or a benchmark in a script."""

    program: Program
    flags: Mapping[str, Any]
    """First name of a flag -> a value, True, or a list of values."""
    spelled: Mapping[str, str]
    """First name of a flag -> its spelling in the line."""
    number: int
    """Line number."""
    left: tuple[str, ...] = ()
    """Variables among its words that the script does not set."""
    pods: ServerPods = field(default_factory=ServerPods)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the engine that are set and may change its behaviour, with their values."""
    release: str = ""
    """Release of its engine, by an image's tag or a pinned package; empty: not said."""
    image: str = ""
    """The image that is taken to start the program by its name alone; empty: none is."""
    places: int = 1
    """Ports and hosts on which equal lines start it, of which this is the first."""

    @property
    def fields(self) -> dict[str, Any]:
        """Field (programs.toml) -> value, without values that depend on unset variables."""
        stated = {self.program.flags[n]: value for n, value in self.flags.items() if n in self.program.flags}
        return {name: value for name, value in stated.items() if not is_open(str(value))}

    def caveats(self, given: Collection[str] = (), taken: Collection[str] = ()) -> Iterator[str]:
        """Yield a line each on flags that are not judged, flags that are not modelled, and unset variables. What a
        flag leaves open and a `given` option says is left out, and variables that are `taken` into account."""
        unknown = [n for n in self.flags if self.program.verdict(n) is None and not self._negated(n)]
        if unknown:
            known = "is a flag" if len(unknown) == 1 else "are flags"
            where = f"{known} of {self.program.names[0]} that Phalanx does not know: time or memory may differ"
            yield f"not judged: {', '.join(map(self._with_near, unknown))} {where}"
        groups: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
        for name, value in self.flags.items():
            verdict = self.program.verdict(name)
            if verdict is None or verdict.effect != "unmodelled" or verdict.is_off(value) or verdict.option in given:
                continue
            groups.setdefault((verdict.what, verdict.changes, verdict.option), []).append(self.spelled[name])
        for (what, changes, option), names in groups.items():
            said = f"; --{option} says it" if option else ""
            yield f"not modelled: {', '.join(names)} ({what}{said}): {' and '.join(changes)} may differ"
        for name, value in self.flags.items():
            if is_open(str(value)) and (verdict := self.program.verdict(name)) and verdict.effect != "none":
                yield f"missing: {self.spelled[name]} is {plain(str(value))}, which the script does not set"
        if self.image:
            yield f"assumed: the image {self.image} starts {' '.join((self.program.names[0], *self.program.words))}"
        if variables := [name for name in self.variables if name not in taken]:
            yield f"not judged: {', '.join(variables)} in its environment: layout, time or memory may differ"
        if self.left:
            yield f"missing: {', '.join(self.left)} may hold more flags, and the script does not set it"

    def _negated(self, name: str) -> bool:
        return name.startswith("no_") and self.program.verdict(name[3:]) is not None

    def _with_near(self, name: str) -> str:
        if name in self.program.known or len(name) >= 80:  # a flag of a new release
            return self.spelled[name]
        near = get_close_matches(name, self.program.known, 1, 0.8)
        return f"{self.spelled[name]} (did you mean --{near[0].replace('_', '-')}?)" if near else self.spelled[name]


@cache
def _verdicts(name: str) -> Mapping[str, Verdict]:
    return verdicts.load(_ROOT / "verdicts" / f"{name}.toml")


PROGRAMS: Mapping[str, Program] = Rows(_ROOT / "programs.toml", record(Program, "title"))
"""Every program that serves or benchmarks."""


def lines(
    text: str, name: str = "script.sh", files: Companions | None = None, pods: Mapping[int, ServerPods] | None = None
) -> list[Line]:
    """Return the servers and benchmarks that a script or a command line starts, in order; the parts of one server are
    one. `files`: the files of `--config`; `pods`: line of a command -> its pods. Raises InputError for text that a
    shell would refuse."""
    started: dict[tuple[str, ...], list[Line]] = {}
    for invocation in follow(text, name=name).invocations:
        place = _program(invocation.words)
        if place is not None:
            program, rest, image = place
            if program.engine in ("vllm", "sglang") and files is not None:
                rest, missing = under_config(rest, files)
                if missing:
                    raise InputError("from", missing, "is its --config, and is not here", "give it too: --from")
            rest = plain_flags(rest) if program.title == "guidellm" else rest
            alike = [w for i, w in enumerate(rest) if not _PLACES.match(w) and not (i and _PLACES.match(rest[i - 1]))]
            first = max((number for number in pods or {} if number <= invocation.line), default=0)
            line = _line(program, rest, invocation.line, (pods or {}).get(first, ServerPods()))
            variables = _variables(invocation.words, invocation.environment)
            line = replace(line, variables=variables, release=_release(text, program.engine), image=image)
            each = started.setdefault((program.title, line.pods.part, *alike), [])
            if not any(_place(line) == _place(other) for other in each):
                each.append(line)
    return [replace(each[0], places=len(each)) for each in started.values()]


_MEETING = ("dist_init_addr", "data_parallel_address", "master_addr")
"""Flags in which the nodes of one server say where they meet."""


def _place(line: Line) -> tuple[Any, ...]:
    """Return where a server listens; of one over several nodes, where these meet."""
    met = tuple(line.flags.get(name) for name in _MEETING)
    return met if any(met) else (line.flags.get("port"), line.flags.get("host"))


_ENGINE_VARIABLE = re.compile(r"(VLLM|SGLANG|SGL|TRTLLM|TLLM)_\w+")
_HARMLESS = re.compile(
    r"LOG|API_KEY|CACHE_ROOT|CACHE_DIR|PORT|HOST|_IP\b|TIMEOUT|DEBUG|TRACE|USAGE|TRACK|MODELSCOPE|PLUGINS|SO_PATH|"
    r"MULTIPROC_METHOD|USE_V1|HEARTBEAT|BOOTSTRAP|SLEEP|WAITING|METRICS|PROFILER"
)
"""Parts of the names of variables that change neither layout, time nor memory."""


_RELEASE = {
    "vllm": re.compile(r"\bvllm(?:-openai)?(?:\[[\w,]*\])?(?:==|:v?)(\d+\.\d+(?:\.\d+)?)"),
    "sglang": re.compile(r"\bsglang(?:\[[\w,]*\])?(?:==|:v?)(\d+\.\d+(?:\.\d+)?)"),
    "trtllm": re.compile(r"\btensorrt[_-]llm(?:/release:|==)(\d+\.\d+(?:\.\d+)?)"),
}
"""Pinned packages and tags of images by engine."""


def _release(text: str, engine: str) -> str:
    """Return the release of an engine that a text pins last; empty if it pins none."""
    pinned = _RELEASE[engine].findall(text) if engine in _RELEASE else []
    return pinned[-1] if pinned else ""


def _variables(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of serving engines that are set for a line, without harmless ones: in its environment, and
    in the words before its program, as for `env` and `docker run -e`."""
    assigned = dict(word.partition("=")[::2] for word in words if "=" in word)
    every = {**environment, **assigned}
    return {
        name: value
        for name, value in every.items()
        if _ENGINE_VARIABLE.fullmatch(name) and not _HARMLESS.search(name)
    }


_SWITCHES = ("-d", "-i", "-t", "-it", "-ti", "-dit", "--detach", "--init", "--privileged", "--rm")
"""Flags of `docker run` without a value."""


def _program(words: Sequence[str]) -> tuple[Program, list[str], str] | None:
    """Return the program in a line's words, the words after it, and the image that may be it by its name alone; None:
    there is none."""
    for place, word in enumerate(words):
        name = re.sub(r"\.py$", "", word.rpartition("/")[2])
        for program in PROGRAMS.values():
            rest = list(words[place + 1 :])
            if name in program.names and _has(program, rest):
                return program, rest, ""
    for place, word in enumerate(words):
        image = word.rpartition("/")[2].partition(":")[0].partition("@")[0]
        for program in PROGRAMS.values():
            if image in program.images:
                return program, list(words[place + 1 :]), ""
    for place, word in enumerate(words):
        rest, before = list(words[place + 1 :]), words[place - 1] if place else ""
        started = "run" in words[:place] or ":" in word.rpartition("/")[2]
        named = "vllm" in re.sub(r"[:@].*", "", word.rpartition("/")[2]) and re.fullmatch(r"[\w.:/@-]+", word)
        value = before.startswith("-") and "=" not in before and before not in _SWITCHES
        if named and started and not value and any(other.partition("=")[0] == "--model" for other in rest):
            return PROGRAMS["vllm_serve"], rest, word
    return None


def _has(program: Program, rest: list[str]) -> bool:
    """Whether the words after a program's name include its subcommands, which are removed."""
    if program.role == "both" and program.engine == "trtllm":  # behind options of the group
        taken = [word for word in program.words if word in rest]
    else:
        taken = [word for word, other in zip(program.words, rest, strict=False) if word == other]
    if len(taken) < len(program.words):
        return False
    for word in taken:
        rest.remove(word)
    return True


def _line(program: Program, words: list[str], number: int, pods: ServerPods) -> Line:
    words = words[: words.index("--")] if "--" in words else words
    options, _assigned, positional = arguments(words)
    flags: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    left: set[str] = set()
    for name, value in options.items():
        full = program.full_name(name)
        verdict = program.verdict(full)
        if verdict is not None and verdict.switch and not isinstance(value, bool):
            rest = value if isinstance(value, list) else [value]
            positional, value = (*positional, *(plain(str(word)) for word in rest)), True
        flags[full] = without_open_flags(value, verdict is not None and verdict.switch)
        spelled[full] = f"--{name}" if len(name) > 1 else f"-{name}"
        left |= {plain(str(w)) for w in (value if isinstance(value, list) else [value]) if is_open(str(w))} - {
            plain(str(flags[full]))
        }
    left |= {word for word in positional if word.startswith("$")}
    first = next((w for w in positional if w not in _ACTIONS and not w.startswith(("http", "$"))), None)
    model = next((flag for flag, meaning in program.flags.items() if meaning == "model"), "")
    if first and model and model not in flags and program.role in ("server", "both"):
        flags, spelled = {model: first, **flags}, {model: first, **spelled}
    return Line(program, flags, spelled, number, tuple(sorted(left)), pods)


def single_line(some: Sequence[Line], what: str) -> Line | None:
    """Return the only line of `some`; None: there is none. `what`: the lines in messages. Raises InputError for
    several."""
    if len(some) > 1:
        numbers = list(dict.fromkeys(str(line.number) for line in some))
        if len(numbers) == 1:
            raise InputError(
                "from", None, f"line {numbers[0]} starts {len(some)} {what}, in a loop", "leave it one value"
            )
        reason = f"starts {len(some)} {what}, in lines {', '.join(numbers[:6])}"
        raise InputError("from", None, reason, "leave one of them in the file")
    return some[0] if some else None
