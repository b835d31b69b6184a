"""What `python -m calibration` fits: the constants, the rows they are fitted on, and the families left out in turn.

A constant is `owner.field`, where the owner is a chip generation (or `nvidia`, all of them), a chip, or a software
stack. Its spread is that of the prior around its parent's value, in logs (for shares, in logits).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from calibration.fit import Data, Free, order
from phalanx.validate.from_row import Case

# Of these families only every n-th row is fitted on, so that a fit takes a minute; errors are over all rows.
THINNED = {
    "vtrain single-node": 7,
    "hf-ultrascale pp>1": 9,
    "hf-ultrascale pp=1": 5,
    "llm-foundry": 2,
    "bigscience-bloom": 2,
    "nvidia-dgxc-benchmarking": 2,
    "nvidia-dgxc-benchmarking MoE": 2,
    "nvidia-dgxc-benchmarking JAX": 2,
    "nemo-megatron-bridge MoE": 2,
}
UNFITTED = ("bigscience-v100", "megatron-ci-golden", "megatron-ci-golden MoE")
"""Families that are predicted but never fitted: times that vary by 40 %, and tests."""

LAUNCHES = ("launch_s", "launch_sync", "launch_backward")
"""Fields that only runs tell which wait for their launches."""

MEASURED = {"hopper.gemm": 0.688, "hopper.gemm_half": 266.9, "hopper.portable_gemm": 0.8208}
"""Constants that are held, not fitted: the rates of products on Hopper by which our own steps on an H100 and an H200
come out (tests/cost/test_on_an_h100.py, test_on_an_h200.py). Those send nothing, while rows of whole trainings cannot
tell slow products from what overlapped collectives cost."""

LEFT_OUT: dict[str, tuple[str, ...]] = {
    "vtrain multi-node": ("vtrain multi-node",),
    "vtrain single-node": ("vtrain single-node",),
    "llm-foundry": ("llm-foundry",),
    "nvidia-dgxc-benchmarking": ("nvidia-dgxc-benchmarking", "nvidia-dgxc-benchmarking MoE"),
    "nvidia-dgxc-benchmarking JAX": ("nvidia-dgxc-benchmarking JAX",),
    "nemo-megatron-bridge": ("nemo-megatron-bridge", "nemo-megatron-bridge MoE"),
    "simumax-b200": ("simumax-b200",),
    "megatron-sc21": ("megatron-sc21",),
    "bigscience-bloom": ("bigscience-bloom",),
    "torchtitan": ("torchtitan", "torchao"),
    "hf-ultrascale": ("hf-ultrascale pp=1", "hf-ultrascale pp>1"),
}
"""Families by the name of `--leave-out`: those of one source are left out together."""

_SOURCES = {"torchao": "torchtitan"}
"""Families that share a source, and its weight, with another."""


def family(case: Case) -> str:
    """Return the family under which a row's error is reported."""
    row = case.row
    if row.family == "vtrain":
        return "vtrain single-node" if "single" in row.group else "vtrain multi-node"
    if row.family == "hf-ultrascale":
        return "hf-ultrascale pp=1" if case.layout.pp == 1 else "hf-ultrascale pp>1"
    if row.family == "nvidia-dgxc-benchmarking" and row["framework"] in ("MaxText", "PAX"):
        return "nvidia-dgxc-benchmarking JAX"
    return f"{row.family} MoE" if row.moe else row.family


def timed(rows: Sequence[Case]) -> list[Case]:
    """Return the cases that ran and whose step time is published."""
    return [c for c in rows if c.measured_s and c.row["status"] in ("", "ok")]


def fitted(rows: Sequence[Case], without: Sequence[str] = ()) -> Data:
    """Return the rows to fit on, thinned; each source has weight 1, or less if it has fewer than 10 rows."""
    seen: dict[str, int] = {}
    keep: list[tuple[Case, str]] = []
    for case in rows:
        name = family(case)
        if name in UNFITTED or name in without:
            continue
        seen[name] = seen.get(name, 0) + 1
        if seen[name] % THINNED.get(name, 1) == 0:
            keep.append((case, name))
    sources = [_SOURCES.get(name, name) for _, name in keep]
    count = Counter(sources)
    weight = np.array([min(1.0, count[name] / 10) / count[name] for name in sources])
    return Data([c for c, _ in keep], np.array([c.measured_s for c, _ in keep]), weight)


def _of(owners: Sequence[str], *fields: tuple[str, float]) -> Iterator[Free]:
    """Yield the constants of some owners, from (field, spread) pairs."""
    for owner in owners:
        for field, spread in fields:
            yield Free(owner, field, spread)


def free() -> list[Free]:
    """Return all constants that are fitted on step times, parents first."""
    constants: list[Free] = []
    constants += _of(
        ("nvidia",),
        ("gemm", 0.6),
        ("gemm8", 0.6),
        ("gemm_half", 0.4),
        ("misaligned", 0.5),
        ("odd", 0.5),
        ("attention_half", 0.4),
        ("memory", 0.1),
        ("portable_attention", 0.4),
        ("attention_narrow", 0.5),
    )
    constants += _of(("ampere", "blackwell"), ("gemm", 1.0), ("gemm_half", 0.3))
    # Rates in 8 bits as shares of their peaks differ by an eighth from generation to generation.
    constants += _of(("hopper", "blackwell"), ("gemm8", 0.15))
    constants += _of(("blackwell",), ("gemm4", 0.8))
    constants += _of(("hopper",), ("portable_attention", 0.5))
    constants += _of(("blackwell-ultra",), ("gemm", 0.1), ("gemm8", 0.15), ("gemm4", 0.15))
    constants += [Free("H100-500W", "clock", 0.1), Free("GB200", "clock", 0.06), Free("GB300", "clock", 0.06)]
    constants += _of(
        ("any",),
        ("hidden_bytes", 0.3),
        ("ffn_bytes", 0.3),
        ("backward_traffic", 0.15),
        ("logit_bytes", 0.3),
        ("launch_s", 0.3),
        ("launch_backward", 0.2),
        ("launch_sync", 0.5),
        ("list_s", 0.3),
        ("tp_overlap", 0.8),
        ("dp_overlap", 0.8),
        ("gather_overlap", 0.8),
        ("ring_bytes", 0.5),
        ("optimizer_bytes", 0.3),
        ("step_s", 0.3),
        ("cast_bytes", 0.5),
        ("fine_cast", 0.3),
        ("token_bytes", 1.0),
        ("grouped", 0.2),
        ("router_s", 0.3),
        ("expert_s", 1.0),
        ("imbalance", 0.7),
        ("expert_launches", 0.5),
        ("ep_overlap", 0.8),
    )
    # A stack of its own has the few constants that its runs tell from its parent's.
    roots = ("eager", "compiled", "megatron-core", "megatron-2020")
    constants += _of(roots, ("hidden_bytes", 0.4))
    constants += _of(roots[1:], ("gemm", 0.05))
    constants += _of(roots[:3], ("dp_overlap", 0.8))
    constants += [Free("megatron-core", "launch_s", 0.15)]
    constants += _of(("compiled", "megatron-core"), ("tp_overlap", 0.8), ("cast_bytes", 0.4))
    constants += _of(("megatron-core",), ("pp_overlap", 0.8))
    constants += _of(("megatron-2020",), ("score_bytes", 0.4))
    stacks: tuple[str, ...] = ("nanotron", "llm-foundry", "torchtitan-compiled", "maxtext", "pax", "simumax-b200")
    stacks += ("megatron-2021", "megatron-2022", "megatron-deepspeed-2022", "nemo-24.03", "nemo-25.04")
    stacks += ("megatron-bridge-26.02", "megatron-bridge-26.04", "megatron-bridge-26.06")
    constants += _of(stacks, ("gemm", 0.08))
    constants += _of(("nanotron", "vtrain", "simumax-b200"), ("launch_s", 0.3))
    of_experts = [f"megatron-bridge-{release}" for release in ("26.04", "26.06", "26.06.01")]
    of_experts = ["nemo-24.11", "nemo-25.05", *of_experts]
    constants += _of(tuple(of_experts), ("token_bytes", 1.0))
    constants += _of(("compiled", "torchtitan-compiled"), ("gemm8", 0.15))
    constants += _of(("torchtitan-compiled", "torchtitan-eager", "nemo-24.11"), ("cast_bytes", 0.4))
    constants += _of(("nanotron",), ("stalled_s", 2.0), ("logit_bytes", 0.3), ("tp_overlap", 0.6))
    constants += _of(("llm-foundry", "torchtitan-eager"), ("contention", 0.5))
    return order(constants)
