"""The page of what libraries of parallel training do, from the facts that benchmarks/stacks_observed.py recorded."""

from __future__ import annotations

import re
from typing import Any

_COLUMNS = (
    "what it does",
    "gathers in a step",
    "reductions in a step",
    "also sent",
    "peak of live bytes",
    "decided at",
)
_KEPT_COLUMNS = ("what is kept for the backward pass", "as a backward pass begins", "decided at")
_ALWAYS = ("parameters", "optimizer state")
_RELEASED_ALONE = ("torchtitan", "accelerate", "DeepSpeed")
"""Libraries with a version of their own; the others are parts of torch."""


def page(facts: dict[str, Any]) -> str:
    """Return the page: a table for every library, one row for every option."""
    cases = facts["cases"]
    lines = [
        "# What DDP, FSDP and other libraries do, as observed",
        "",
        f"Each case trains four blocks of {facts['block_parameters']:,} parameters on {facts['world']} ranks with "
        f"AdamW, in {facts['micro_batches']} micro-batches a step; torchtitan trains its own debug model. Figures "
        "are those of rank 0 in its second step, recorded by `python -m benchmarks.stacks_observed`.",
        "",
        "- F is the forward pass, B the backward pass, I and W its parts (gradients of inputs and of weights), and "
        "opt what follows the last backward pass.",
        "- Each peak of live bytes names the kind of tensor that takes most of it.",
        "- The second table of each library has what is kept for the backward pass: live bytes other than parameters "
        "and optimizer state when the fullest backward pass of the step begins.",
        "",
        "[stacks_observed.json](stacks_observed.json) has the data by micro-batch and by unit.",
    ]
    for stack in dict.fromkeys(c["stack"] for c in cases):
        rows = [c for c in cases if c["stack"] == stack]
        library = (
            f"{stack} {rows[0]['version']}" if stack in _RELEASED_ALONE else f"{stack}, torch {rows[0]['version']}"
        )
        lines += [
            "",
            f"## {library}",
            "",
            f"| option | {' | '.join(_COLUMNS)} |",
            "|---|---|---|---|---|---|---|",
        ]
        for c in rows:
            gathers, reductions, other = (_in_words(c[kind]) for kind in ("gathers", "reductions", "other"))
            kind, most = max(c["held_at_peak"].items(), key=lambda item: item[1])
            peak = f"{c['peak_bytes']:,} in {c['peak_phase']}, {most:,} of it {kind}"
            lines.append(
                f"| {c['option']} | {c['fact']} | {gathers} | {reductions} | {other} | {peak} | `{c['source']}` |"
            )
        lines += ["", f"| option | {' | '.join(_KEPT_COLUMNS)} |", "|---|---|---|---|"]
        for c in rows:
            lines.append(f"| {c['option']} | {c['keeps']} | {_kept_in_words(c)} | `{c['keeps_source']}` |")
    return "\n".join(lines) + "\n"


def _kept_in_words(case: dict[str, Any]) -> str:
    """Return the live bytes other than parameters and optimizer state when the fullest backward pass begins."""
    starts = case["held_before_backward"]
    start = max(starts, key=lambda b: sum(b["held"].values()))
    held = sorted(((n, kind) for kind, n in start["held"].items() if kind not in _ALWAYS), reverse=True)
    of = f"{start['phase']} of micro-batch {start['micro_batches'][0]}"
    return f"{of}: {', '.join(f'{n:,} {kind}' for n, kind in held)}"


def _in_words(counts: dict[str, int]) -> str:
    """Return the operations of all micro-batches together."""
    totals: dict[str, int] = {}
    for what, n in counts.items():
        kind = re.sub(", micro-batch .*", "", what)
        totals[kind] = totals.get(kind, 0) + n
    return "; ".join(f"{n} x {what}" for what, n in totals.items()) or "none"
