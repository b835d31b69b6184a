"""Drawn plans as cases for the frameworks' own parsers."""

from __future__ import annotations

import random
import shlex
from collections import Counter
from typing import Any

from phalanx.answers.configurations.export import TARGETS
from phalanx.frameworks.stack import Stack
from phalanx.frameworks.writing.program import TrainingProgram
from phalanx.frameworks.writing.script import words
from phalanx.frameworks.writing.subject import Subject, subject
from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.errors import InputError
from support.exports import draw

FILLED = {"LR": "0.0001", "MIN_LR": "0.00001", "TRAIN_ITERS": "100"}
"""Blanks that are numbers; others are filled with their own names."""


def arguments(p: TrainingProgram) -> list[str]:
    """Return the words of a command line as bash makes them, blanks filled in."""
    result: list[str] = []
    for g in p.groups:
        for s in g.settings:
            for word in shlex.split(words(s)):
                result.append(FILLED.get(word[1:], word[1:]) if word.startswith("$") else word)
    return result


def cases(to: str, stack: Stack, count: int, seed: int) -> tuple[list[dict[str, Any]], list[Subject], Counter[str]]:
    """Draw `count` exports: cases, what they are of, and how many were refused for which reason."""
    rng = random.Random(f"{to} {stack.name} {seed}")
    result: list[dict[str, Any]] = []
    subjects: list[Subject] = []
    refused: Counter[str] = Counter()
    while len(result) < count:
        plan = draw.plan(stack, rng)
        try:
            x = subject(plan, stack)
            p = TARGETS[to].program(x)
        except InputError as error:
            refused[f"{error.field}: {error.reason}"] += 1
            if sum(refused.values()) > 100 * count:
                raise RuntimeError(f"{to} refuses nearly everything: {refused.most_common(5)}") from error
            continue
        expected = {
            **{name: getattr(x.s, name) for name in ("world", "dp", "zero", "micro_batch", "pp", "tp", "cp")},
            "virtual": len(rank_of(x.s)) // x.s.pp if x.s.pp > 1 else 1,
            "micro_batches": x.micro_batches,
        }
        result.append(
            {
                "files": p.files,
                "arguments": arguments(p) if p.arguments else [],
                "world": x.s.world,
                "environment": {b.name: FILLED.get(b.name, b.name) for b in p.blanks}
                | {v.name: v.value for v in p.variables},
                "expected": expected,
            }
        )
        subjects.append(x)
    return result, subjects, refused
