"""The training that a text starts: a command line, a script, a batch script or a manifest, with its arguments."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.frameworks.companions import MISSING
from phalanx.frameworks.launchers import batch
from phalanx.frameworks.launchers.launch import launch
from phalanx.frameworks.launchers.launcher import Allocation, OpenFile, ProgramLaunch
from phalanx.frameworks.launchers.manifest import manifest
from phalanx.frameworks.shell.invocation import Invocation
from phalanx.frameworks.shell.programs import SCRIPTS, SHELLS
from phalanx.frameworks.shell.scope import OPEN, is_open, plain
from phalanx.frameworks.shell.script import Script, follow
from phalanx.frameworks.values import words_of
from phalanx.spec.errors import InputError

_ASSIGNED = re.compile(r"(?:\+{0,2}[A-Za-z_][\w./@-]*=|~[A-Za-z_][\w./@-]*(?:=|$))")
_PREPARES = re.compile(
    r"preprocess|convert|download|tokeni[sz]e|prepare|merge|eval|benchmark|inference|collect_env|test_|setup|check|"
    r"index_|split_|upload|export|generate|serv(e|ing)|pip$"
)
_LAUNCHERS_OF_RANKS = {"torchrun", "deepspeed", "accelerate", "srun", "mpirun", "torchx", "torchtune"}
_SPREADS = re.compile(r"\b(srun|mpirun|mpiexec|ssh|pdsh|clush|pssh|torchx|ray|jsrun|xargs|submitit)\b")
"""Programs that start others on every node of a job."""
_FLAG = re.compile(r"--[A-Za-z]")
_FENCED = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*(?:bash|sh|shell|console|zsh|text)?[ \t]*\n(.*?)^[ \t]*\1[ \t]*$", re.M | re.S
)
Knows = Callable[[ProgramLaunch], bool]
"""Whether a framework knows a program or its arguments."""


@dataclass(frozen=True)
class Started:
    """A training as a text starts it. `args`: its flags, with a value, a list of several, or True for none;
    `assigned`: its `key=value` words; `positional`: its other words; `environment`: exported to it; `directory`:
    where it starts, relative to the text; `given`: what its batch job asks for."""

    launch: ProgramLaunch
    args: Mapping[str, Any] = field(default_factory=dict)
    assigned: Mapping[str, Any] = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the text itself writes, text by name."""
    directory: str = ""
    given: Allocation = field(default_factory=Allocation)
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Scripts that it runs as its program and that were not given, each as a sentence."""


def in_script(text: str, open_file: OpenFile, knows: Knows, name: str = "script.sh") -> Started:
    """Return the training that a script or a command line starts. Raises InputError where it starts two."""
    if blocks := _FENCED.findall(text):  # of a README, or of an issue
        text = "\n".join(block for _, block in blocks)
    given, variables = batch.requests_of(text)
    script = follow(text, variables, open_file, name, submitted=lambda handed: batch.requests_of(handed)[1])
    for handed in script.batch:  # scripts that it hands to Slurm
        given = batch.requests_of(handed)[0]
    started = _started(script, given, open_file, knows)
    said = _of_nodes(started.launch, given, any(_SPREADS.search(part) for part in (text, *script.batch)))
    return replace(started, notes=(*started.notes, said)) if said else started


def _of_nodes(one: ProgramLaunch, given: Allocation, spreads: bool) -> str:
    """Return a note where a launcher starts ranks on other nodes than its batch script asks for; "" where it does
    not."""
    if given.by != "#SBATCH" or not given.nodes:
        return ""
    if (one.nodes or 0) > given.nodes:
        return f"ranks start on {one.nodes} nodes, and #SBATCH asks for {given.nodes}"
    alone = not spreads and one.launchers and one.launchers[-1] in ("torchrun", "accelerate")
    if given.nodes == 1 or not alone or not one.world:
        return ""
    here = one.per_node or one.world // given.nodes
    return (
        f"a batch script runs on the first of its {given.nodes} nodes: without srun {one.launchers[-1]} starts "
        f"{here} of {one.world} ranks, which wait for the others"
    )


def in_manifest(documents: Sequence[Any], open_file: OpenFile, knows: Knows) -> Started:
    """Return the training that a manifest's pods start. Raises InputError where it has none, or two."""
    job = manifest(documents)
    given, variables = job.pods.given(job.kind, job.per_node)

    def open_either(path: str) -> str | None:
        inside = job.pods.files.get(path.rpartition("/")[2])
        return inside if inside is not None else open_file(path)

    script = follow(job.pods.command, variables, open_either, job.kind)
    started = _started(script, given, open_either, knows, variables)
    environment = {n: v for n, v in started.environment.items() if n not in variables or n in job.pods.environment}
    return replace(started, files={**job.pods.files, **started.files}, environment=environment)


def _started(
    script: Script, given: Allocation, open_file: OpenFile, knows: Knows, environment: Mapping[str, str] | None = None
) -> Started:
    trainings: dict[tuple[Any, ...], tuple[Invocation, ProgramLaunch]] = {}
    for invocation, words in ((i, words) for i in script.invocations for words in _components(i.words)):
        one = _of_script(launch(words, {**(environment or {}), **invocation.environment}, given, open_file))
        if one.program or one.words:
            # Lines that differ in their node's number and addresses start parts of one training.
            same = (one.program, *(w for w in one.words if not re.match(r"--?(node.rank|master|rdzv)", w)))
            trainings.setdefault(same, (invocation, one))
    chosen = _training_among(list(trainings.values()), knows)
    if chosen is None:
        return _arguments_alone(script, given)
    invocation, one = chosen
    part = "srun" in one.launchers and {"nodes", "N"} & one.options.keys()  # of the job's nodes
    one = replace(one, asked=None if part else given.ranks, kind=given.kind)
    args, assigned, positional = arguments(one.words)
    script_of_its_own = one.program.endswith(SCRIPTS)
    if script_of_its_own:  # which may start several ranks each time
        one = replace(one, world=None, per_node=None)
    ranks = "" if one.world else ", and so are its ranks"
    notes = [f"{word} brings options of its launcher: they are open{ranks}" for word in one.open]
    lines = [note for note in script.notes if not (script_of_its_own and note.startswith(f"{plain(one.program)}, "))]
    forks = [note for fork in script.forks if (note := fork.note(invocation.names))]
    return Started(
        one,
        args,
        assigned,
        positional,
        {**(environment or {}), **invocation.environment},
        script.files,
        invocation.directory,
        given,
        (*notes, *lines, *forks),
        (f"{plain(one.program)}, which it runs, {MISSING}",) if script_of_its_own else (),
    )


def _of_script(one: ProgramLaunch) -> ProgramLaunch:
    """Return a launch whose program is the script that a shell runs: train.sh of `bash -x train.sh --flags`."""
    words = [word for word in one.words if not re.fullmatch(r"-[a-z]+", word)]
    if one.program.rpartition("/")[2] not in SHELLS or not words or not words[0].endswith(SCRIPTS):
        return one
    return replace(one, program=words[0], words=one.words[one.words.index(words[0]) + 1 :])


def _components(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the commands that a launcher starts side by side, `srun A : B` and `mpirun -np 1 A : -np 2 B`."""
    if ":" not in words or words[0].rpartition("/")[2] not in ("srun", "mpirun", "mpiexec"):
        return [words]
    at = words.index(":")
    return [words[:at], *_components((words[0], *words[at + 1 :]))]


def _training_among(
    trainings: list[tuple[Invocation, ProgramLaunch]], knows: Knows
) -> tuple[Invocation, ProgramLaunch] | None:
    """Return the one invocation that trains. Raises InputError where several do."""
    if not trainings:
        return None

    def rank(one: ProgramLaunch) -> tuple[bool, bool, bool]:
        name = one.program.rpartition("/")[2]
        name += "" if "." in name else f" {one.words[0]}" if one.words[:1] and one.words[0][:1] != "-" else ""
        return (
            not _PREPARES.search(name),
            knows(one),
            bool(_LAUNCHERS_OF_RANKS.intersection(one.launchers)),
        )

    best = max(rank(one) for _, one in trainings)
    equal = [(invocation, one) for invocation, one in trainings if rank(one) == best]
    if not best[0]:
        return equal[0]
    if not any(best[1:]):
        return max(equal, key=lambda pair: sum(w.startswith("--") for w in pair[1].words))
    if len(equal) > 1:
        lines = ", ".join(dict.fromkeys(str(invocation.line) for invocation, _ in equal[:4]))
        programs = ", ".join(dict.fromkeys(plain(one.program) for _, one in equal[:4]))
        reason = f"starts {len(equal)} trainings, in lines {lines}: {programs}"
        raise InputError("script", None, reason, "give the command line of one of them")
    return equal[0]


def _arguments_alone(script: Script, given: Allocation) -> Started:
    """Return the training of a script that starts nothing, by the variable or array with the most flags."""
    texts = [(name, [w for v in values for w in words_of(v)]) for name, values in script.variables.items()]
    flags = [(name, words) for name, words in texts if any(map(_FLAG.match, words))]
    if not flags:
        return Started(ProgramLaunch(), given=given, notes=script.notes, files=script.files)
    name, words = max(flags, key=lambda pair: sum(bool(_FLAG.match(w)) for w in pair[1]))
    first = next(i for i, word in enumerate(words) if _FLAG.match(word))
    one = launch(tuple(words)) if first else ProgramLaunch(words=tuple(words))
    args, assigned, positional = arguments(one.words)
    notes = (*script.notes, f"it starts nothing: the flags are {name}'s")
    return Started(one, args, assigned, positional, files=script.files, given=given, notes=notes)


def arguments(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Return flags with their values, `key=value` words, and the words before the first flag."""
    args: dict[str, Any] = {}
    assigned: dict[str, Any] = {}
    positional: list[str] = []
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            args[name] = value_of(value) if equals else True
            name = "" if equals else name
        elif _ASSIGNED.match(word) and not (name and args[name] is True and "/" in word.partition("=")[0]):
            key, _, value = word.partition("=")
            assigned[key] = value_of(value)
        elif name:
            earlier = args[name]
            if isinstance(earlier, list):
                earlier.append(value_of(word))
            else:
                args[name] = value_of(word) if earlier is True else [earlier, value_of(word)]
        else:
            positional.append(plain(word))
    return args, assigned, tuple(positional)


def value_of(text: str) -> Any:
    """Return the number or truth value that a word spells, else the word itself."""
    if is_open(text):
        return text
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", text) and len(text) < 40:
        return float(text)
    return {"true": True, "false": False, "True": True, "False": False}.get(text, text)


def without_open_flags(value: Any, switch: bool) -> Any:
    """Return a flag's value without open words that bring flags of their own: True of `--flag $EXTRA_ARGS`.

    `switch`: whether the flag takes no value, so that no word behind it is one."""
    words = value if isinstance(value, list) else [value]
    left = open_flags(value, switch)
    if not left:
        return value
    rest = [word for word in words if word not in left]
    return True if not rest else rest[0] if len(rest) == 1 else rest


def open_flags(value: Any, switch: bool) -> list[str]:
    """Return the open words behind a flag that bring flags of their own. `switch`: as in without_open_flags."""
    words = value if isinstance(value, list) else [value]
    words = [w for w in words if isinstance(w, str) and w.startswith(OPEN) and "/" not in w]  # which a path has
    return [w for w in words if switch or _BAG.search(plain(w)[1:])]


_BAG = re.compile(r"(?i)(extra|more|other|add|arg|opt|flag|param|config|setting|@|\*)(?!.*\.\w+$)")
