"""A command line or a shell script as {launch, env, args}: nothing of it is run.

Assignments, `export`, arrays (`ARGS=( ... )`, `+=`), continuations, `$NAME`, `${NAME}`, `${NAME:-default}`,
`${ARRAY[@]}` and products in `$(( ))` are followed; what they leave open stays as it is written. Of several commands
the one with the most flags is taken.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

_ASSIGNED = re.compile(r"^\s*(?:export\s+|readonly\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=]([^}]*))?\}|\$([A-Za-z_]\w*)")
_PRODUCT = re.compile(r"\$\(\(\s*([\d\s*+/-]+?)\s*\)\)")
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "accelerate", "srun")
_DEEP = 20
_LAUNCH = {"nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint"}
_LAUNCH |= {"max_restarts", "tee", "log_dir", "num_gpus", "num_nodes", "hostfile", "include", "exclude", "role"}
_LAUNCH |= {
    "rdzv_id",
    "standalone",
    "local_ranks_filter",
    "redirects",
    "num_processes",
    "num_machines",
    "config_file",
}


def read(text: str) -> dict[str, Any]:
    """Return {launch, env, args} of the command with the most flags; args is empty where there is none."""
    variables: dict[str, str] = {}
    env: dict[str, Any] = {}
    commands: list[str] = []
    for statement in _statements(text):
        found = _ASSIGNED.match(statement)
        rest = found[3] if found else ""
        if found and (rest.lstrip().startswith("(") or _one_word(rest)):
            value = rest.strip()
            inner = value[1:-1] if value.startswith("(") and value.endswith(")") else _unquoted(value)
            inner = _expanded(inner, variables)
            name = found[1]
            variables[name] = f"{variables.get(name, '')} {inner}".strip() if found[2] else inner
            if statement.lstrip().startswith("export"):
                env[name] = _value(inner)
        elif "--" in statement or "=" in statement:
            commands.append(_expanded(statement, variables))
    parsed = [_command(_words(command)) for command in commands]
    parsed.append(_command(_words(" ".join(f"{v}" for v in variables.values() if v.lstrip().startswith("--")))))
    best = max(parsed, key=lambda one: len(one[1]))
    return {"launch": best[0], "env": env, "args": best[1]}


def _statements(text: str) -> list[str]:
    """Return statements: lines joined at backslashes, open quotes and open parentheses, comments left out."""
    lines = text.replace("\r\n", "\n").replace("\\\n", " ").split("\n")
    statements: list[str] = []
    held = ""
    for line in lines:
        bare = re.sub(r"(^|\s)#.*$", "", line)
        held = f"{held}\n{bare}" if held else bare
        quotes = held.count('"') - held.count('\\"')
        array = _ASSIGNED.match(held)
        open_array = bool(array and array[3].lstrip().startswith("(") and held.count("(") > held.count(")"))
        if quotes % 2 or open_array:
            continue
        statements += [part for part in re.split(r"\s&&\s|;\s", held) if part.strip()]
        held = ""
    return [*statements, *([held] if held.strip() else [])]


def _one_word(text: str) -> bool:
    words = _words(text)
    return len(words) <= 1


def _unquoted(text: str) -> str:
    words = _words(text)
    return words[0] if words else ""


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Return text with its variables replaced; those without a value stay."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    for _ in range(_DEEP):
        replaced = _VARIABLE.sub(value, text)
        if len(replaced) > 10**6 or replaced == text:
            break
        text = replaced
    return _PRODUCT.sub(_computed, text)


def _computed(match: re.Match[str]) -> str:
    """Return products and quotients of whole numbers, left to right; anything else stays."""
    parts = match[1].split()
    if not parts or not parts[0].isdigit():
        return match[0]
    total = int(parts[0])
    for sign, number in zip(parts[1::2], parts[2::2], strict=False):
        if not number.isdigit() or sign not in "*/" or (sign == "/" and not int(number)):
            return match[0]
        total = total * int(number) if sign == "*" else total // int(number)
    return str(total)


def _command(words: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a launcher's options and a program's. A flag without a value is true; with several, a list."""
    script = next((i for i, w in enumerate(words) if w.endswith(".py")), None)
    launched = script is not None and any(w.rpartition("/")[2] in _LAUNCHERS for w in words[:script])
    launch = _flags(words[:script]) if launched and script is not None else {}
    args = _flags(words if script is None else words[script + 1 :])
    for name in [n for n in args if n.replace("-", "_") in _LAUNCH] if not launched else []:
        launch[name] = args.pop(name)  # launcher and program in one array
    return {name.replace("-", "_"): value for name, value in launch.items()}, args


def _flags(words: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            result[name] = _value(value) if equals else True
            name = "" if equals else name
        elif name:
            held = result[name]
            result[name] = (
                _value(word) if held is True else [*(held if isinstance(held, list) else [held]), _value(word)]
            )
        elif re.match(r"^[A-Za-z_][\w.]*=", word):
            key, _, value = word.partition("=")
            result[key] = _value(value)
    return result


def _value(text: str) -> Any:
    """Return a number or truth value that a word stands for, else the word."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?", text):
        return float(text)
    return {"true": True, "false": False, "True": True, "False": False}.get(text, text)
