"""train.sh: what one node runs, whichever launcher starts it there.

It reads NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, which a launcher sets on every node (one node needs none).
"""

import re
import shlex
import textwrap
from collections.abc import Iterable
from pathlib import Path

from phalanx.frameworks.writing.program import FILL_IN, Group, Setting, TrainingProgram

TEMPLATES = Path(__file__).parents[1] / "templates"
_WIDTH = 100


def filled(template: Path, **values: object) -> str:
    """Return a template's text with values in place of `{{ name }}`. Raises KeyError for a name without a value."""
    return re.sub(r"\{\{ (\w+) \}\}", lambda match: str(values[match[1]]), template.read_text())


def comment(text: str, indent: str = "") -> str:
    """Write a text as lines of shell or YAML comments. Characters that end a line in either become blanks."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return "".join(f"{indent}# {line}\n" for line in textwrap.wrap(text, _WIDTH - len(indent) - 2))


def words(setting: Setting) -> str:
    """Write a setting as words of a shell line."""
    if setting.value is True:
        return setting.key
    values = setting.value if isinstance(setting.value, tuple) else (setting.value,)
    return " ".join((setting.key, *map(_word, values)))


def _word(value: object) -> str:
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    if not re.search(r"\$\{?[A-Za-z_]", text):
        return shlex.quote(text)
    return '"' + re.sub(r'([\\"`]|\$\()', r"\\\1", text) + '"'  # a blank, or a variable that a user's file reads


def _array(groups: Iterable[Group]) -> str:
    lines = ["ARGUMENTS=(\n"]
    for group in groups:
        lines.append(comment(f"{group.title}. {group.why}", "  "))
        lines += [f"  {words(s)}\n" for s in group.settings]
    return "".join((*lines, ")\n"))


def train_sh(p: TrainingProgram, per_node: int, nodes: int = 1) -> str:
    """Write train.sh. `per_node`: ranks of a node."""
    first = "${MASTER_ADDR:-127.0.0.1}" if nodes == 1 else "${MASTER_ADDR:?is the address of the first node}"
    parts = [
        "#!/bin/bash\n",
        comment(f"{p.title}: the ranks of one node. Written by phalanx export."),
        *(comment(f"Note: {note}") for note in p.notes),
        "set -euo pipefail\n",
        'cd "$(dirname "$0")"\n',
    ]
    if p.blanks:
        parts.append("\n# Blanks: fill them in here, or set them in the environment.\n")
        for b in p.blanks:
            parts.append(comment(b.what))
            parts.append(f"export {b.name}=${{{b.name}:-{shlex.quote(b.default)}}}\n")
        names = " ".join(b.name for b in p.blanks)
        parts.append(
            f"for name in {names}; do\n"
            f'  [[ "${{!name}}" != {FILL_IN}* ]] || {{ echo "$0: $name is a blank: fill it in" >&2; exit 2; }}\n'
            "done\n"
        )
    if p.variables:
        parts.append("\n# What the layout needs of the environment.\n")
        for v in p.variables:
            parts.append(comment(v.why))
            parts.append(f"export {v.name}={shlex.quote(v.value)}\n")
    parts.append(
        "\n# Set by the launcher on every node.\n"
        f"NNODES=${{NNODES:-{nodes}}} NODE_RANK=${{NODE_RANK:-0}} NPROC_PER_NODE=${{NPROC_PER_NODE:-{per_node}}}\n"
        f"MASTER_ADDR={first} MASTER_PORT=${{MASTER_PORT:-29500}}\n"
    )
    if p.arguments:
        parts.append("\n" + _array(p.groups))
    parts.append(f"\n{p.start}\n")
    return "".join(parts)


TORCHRUN = (
    'torchrun --nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node="$NPROC_PER_NODE" \\\n'
    '  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
)
"""How train.sh starts ranks with torchrun: a fixed world, whose ranks follow one another node by node."""
