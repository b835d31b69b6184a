"""What an export can hold of a plan: a field or option that changes none of its files is at its default."""

from __future__ import annotations

import re
from dataclasses import replace

from phalanx.answers.configurations.export import TARGETS, export
from phalanx.frameworks.deepspeed.read import GRADIENT_BYTES
from phalanx.frameworks.stack import Stack
from phalanx.frameworks.writing.subject import subject
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.strategy.spec import FIELDS, Strategy
from phalanx.spec.strategy.stack_options import StackOptions


def canonical(plan: Plan, to: str, stack: Stack) -> tuple[Strategy, StackOptions]:
    """Return the strategy and the options of a plan as reading its export must give them."""
    x = subject(plan, stack)
    written, s, options = _files(plan, to), x.s, x.options.changed()
    for name in ("grad_sync", "reshard", "bucket"):
        if getattr(s, name) != FIELDS[name].default:
            other = replace(s, **{name: FIELDS[name].default})
            s = other if _files(replace(plan, strategy=other), to) == written else s
    for name in [*options, *options]:  # one may have been there for another
        if name not in options:
            continue
        other = {n: v for n, v in options.items() if n != name}
        same = replace(plan, options=StackOptions(**other))
        options = other if _files(same, to) == written else options
    if elements := options.pop("bucket_elements", 0):  # DeepSpeed's key of both
        s = replace(s, bucket=elements * GRADIENT_BYTES / 2**20)
    # What a file without a word says by itself.
    if plan.model.experts and to in ("megatron", "bridge", "torchtitan"):
        options.setdefault("routing", "learned")
        if to != "torchtitan":
            options.setdefault("graphs", "none")
    if to == "accelerate" and s.level.gradients and x.compute in ("bf16", "fp16"):
        options.setdefault("reduce", "bfloat16")  # mixed precision's own type
    return s, StackOptions(**options)


def _files(plan: Plan, to: str) -> dict[str, str] | None:
    """Return an export's files without comments; None where it is refused."""
    try:
        files = export(plan, to).files
    except InputError:
        return None
    assert to in TARGETS
    return {name: re.sub(r"(?m)^\s*#.*\n", "", text) for name, text in files.items()}
