"""What a script starts: its commands in order, with the words and variables that they would have. Nothing is run.

Branches are decided by the script's own assignments. Where a variable of the environment decides, it is taken as
unset, and the note says what it would change; where only a running shell could tell, both branches are followed, and
what differs between them is open. Programs are taken to succeed.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from phalanx.frameworks.shell import output
from phalanx.frameworks.shell.follower import Include, Submitted
from phalanx.frameworks.shell.grammar import parse
from phalanx.frameworks.shell.invocation import ControlExit, Fork, Invocation
from phalanx.frameworks.shell.machine import ScriptFollower
from phalanx.frameworks.shell.scope import Scope
from phalanx.spec.errors import InputError

_PROMPT = re.compile(r"[ \t]*(?:\([\w.-]+\)[ \t]*)*(?:\[?[\w.-]+@[\w.-]+[: ][^\s#$%\]]*\]?[#$%]|\$)[ \t]+(?=\S)")
"""What a shell prints before a line that is typed: `(env) user@host:~/path$ `, `[user@host path]# `, `$ `."""

_QUOTED = re.compile("\ufeff?>(>>)?( |\r?$)")
"""`> ` and `>>> `, which a mail and an interpreter put in front of a line."""
_TRACED = re.compile(r"^\++ (\S.*)$", re.M)
"""Lines of `set -x`."""


@dataclass(frozen=True)
class Script:
    """What a script comes to. `invocations`: programs that it starts, in order; `files`: that it writes, text by
    path; `variables`: words by name, as it leaves them; `forks`: where it does not decide; `notes`: what was
    assumed."""

    invocations: tuple[Invocation, ...]
    files: Mapping[str, str]
    variables: Mapping[str, tuple[str, ...]]
    forks: tuple[Fork, ...]
    notes: tuple[str, ...]
    batch: tuple[str, ...] = ()
    """What its batch system is asked for: itself, and scripts that it submits."""


def _without_prompts(text: str) -> str:
    """Return the commands of a text: of a pasted session, the lines behind prompts; of the output of `set -x`, its
    `+` lines; of a Markdown fence or a quoted mail, what is inside; other texts unchanged."""
    if text.lstrip().startswith("```"):
        text = re.sub(r"(?m)^[ \t]*```.*$", "", text)
    if text.startswith((">", "\ufeff>")) and all(_QUOTED.match(line) for line in text.split("\n") if line.strip()):
        text = "\n".join(_QUOTED.sub("", line) for line in text.split("\n"))
    if len(traced := _TRACED.findall(text)) > 1:
        return "\n".join(traced)
    typed, behind = [], False
    for line in text.splitlines():
        prompt = _PROMPT.match(line)
        typed.append(line[prompt.end() :] if prompt else line if behind else "")
        behind = bool(prompt or behind) and line.rstrip().endswith("\\")
    return "\n".join(typed) if any(typed) else text


def follow(
    text: str,
    given: Mapping[str, str] | None = None,
    include: Include = lambda path: None,
    name: str = "script.sh",
    arguments: Iterable[str] = (),
    submitted: Submitted = lambda text: {},
) -> Script:
    """Follow a script or a command line. `given`: variables that its batch system sets; `include`: path -> text of a
    script that it calls, None where there is none; `submitted`: text of a script that it submits -> the variables
    that the batch system sets for it. Raises InputError for what a shell would refuse."""
    text = _without_prompts(text)
    machine = ScriptFollower(include, submitted)
    scope = Scope({k: [v] for k, v in (given or {}).items()}, name=name, arguments=list(arguments))
    scope.capture = partial(output.capture, machine)
    chain, notes = parse(text)
    machine.notes += notes
    machine.batch += [text] if "#SBATCH" in text else []
    try:
        machine.chain(chain, scope)
    except ControlExit:
        pass
    except RecursionError:
        raise InputError("script", None, "is nested too deep", "give the command line that it comes to") from None
    variables = {k: tuple(v) for k, v in scope.variables.items()}
    return Script(
        tuple(machine.invocations),
        machine.files,
        variables,
        tuple(machine.forks),
        tuple(dict.fromkeys(machine.notes)),
        tuple(machine.batch),
    )
