"""Megatron's pipeline layouts: `Et*3|(t*4|)*6t*4L` lists what every chunk holds, in the order of the model.

E embedding, t block, m depth of multi-token prediction, L head and loss; `|` ends a chunk, `*n` repeats the letter or
the group in brackets before it (megatron/core/transformer/pipeline_parallel_layer_layout.py).
"""

import re
from itertools import groupby

from phalanx.spec.errors import InputError

_LONGEST = 100_000
"""Letters of the longest layout."""


def to_text(blocks: tuple[int, ...], mtp: int = 0) -> str:
    """Return the layout of chunks. `blocks`: of each chunk; `mtp`: depths of multi-token prediction, before the
    loss."""
    chunks = ["t" if n == 1 else f"t*{n}" if n else "" for n in blocks]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += "m" * mtp + "L"
    parts = []
    for text, run in groupby(chunks[:-1]):
        count = len(list(run))
        parts.append(f"({text}|)*{count}" if count > 1 else f"{text}|")
    return "".join((*parts, chunks[-1]))


def read(layout: str, where: str = "--pipeline-model-parallel-layout") -> tuple[tuple[int, ...], int]:
    """Read a layout: (blocks of each chunk, depths of multi-token prediction). Raises InputError."""
    text = _repeated(_repeated(layout.replace(",", ""), r"\(([^()]*)\)"), r"([EtmL|])")
    if not re.fullmatch(r"E[t|]*[m|]*L", text):
        raise InputError(where, layout, "is not a pipeline layout", "e.g. Et*3|(t*4|)*6t*4L")
    return tuple(chunk.count("t") for chunk in text.split("|")), text.count("m")


def _repeated(text: str, what: str) -> str:
    """Return a text with the repetitions `what*n` written out; unchanged where that would be too long for a
    layout."""
    pattern = what + r"\*([0-9]{1,5})"
    if len(text) + sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, text)) > _LONGEST:
        return text
    return re.sub(pattern, lambda m: m[1] * int(m[2]), text)
