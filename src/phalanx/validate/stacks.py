"""The software stack of a row by framework and release, its number format and its recomputation.

An unknown release is priced as the nearest one of its stack, an unknown framework as a generic stack, compiled or
eager.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from phalanx.frameworks.registry import STACKS
from phalanx.validate.models import Unspecified
from phalanx.validate.records import Row

_COMPILERS = ("compile", "jax", "xla", "inductor", "maxtext")
"""Words in a row's framework and options that indicate that a compiler fuses its kernels."""

_BF16_GRADIENTS = ("nemotron-340b", "nemotron4-340b", "mixtral")
"""Name prefixes of models whose recipes reduce gradients in bf16 where a stack offers both types."""

_REPEATED_NOTHING = ("vtrain/single-node",)
"""Groups of runs whose table states recomputation, but whose times do not include it. Of vTrain's runs in one node, a
block of h = 2,048 takes 16.5 ms for 8 sequences of 1,024 tokens (the slope over layers, at two and at four stages).
Repeated, its forward pass would make the products 3.3e12 FLOP, and scores, masks and norms take 5 ms of the 16.5:
products at 290 of an A100's 312 TFLOP/s. Without it they run at 220. vTrain's own predictor repeats nothing on a
last stage either, which without a pipeline is the whole model (VIA-Research/vTrain f8dda84,
src/predictor.py:256)."""


@dataclass(frozen=True)
class PricingStack:
    """The stack that prices a row. `stated`: the stack named by the row, if it is unknown and `name` substitutes for
    it; `generic`: whether `name` is not a release of the row's framework at all."""

    name: str
    stated: str = ""
    generic: bool = False


def stack_of(row: Row) -> PricingStack:
    """Return the stack whose constants price a row: its own, the nearest release of its own, or a generic one."""
    name = _profile_name(row)
    if name is None:
        return PricingStack(generic_stack(row), row["framework"] or "not stated", generic=True)
    known = name if name in STACKS else _nearest_release(name)
    stated = "" if known == name else name
    in_bf16 = f"{known}-bf16"
    if in_bf16 in STACKS and row["model"].lower().startswith(_BF16_GRADIENTS):
        known = in_bf16
    return PricingStack(known, stated)


def generic_stack(row: Row) -> str:
    """Return the generic stack that a row would have if its framework were unknown."""
    words = f"{row['framework']} {row['framework_version']} {row['options']}".lower()
    return "compiled" if any(word in words for word in _COMPILERS) else "eager"


def _nearest_release(name: str) -> str:
    """Return the known release of the same stack that is nearest in time; of two equally near, the earlier. A name
    without a release gets the newest."""
    known = [(stack, months) for stack in STACKS if (months := _months(stack)) is not None]
    releases = {stack: months for stack, months in known if name.startswith(re.split(r"\d", stack)[0])}
    wanted = _months(name)
    if wanted is None:
        return max(releases, key=lambda stack: releases[stack])
    return min(releases, key=lambda stack: (abs(releases[stack] - wanted), releases[stack]))


def _months(name: str) -> float | None:
    """Return the months of a release such as 25.09 or 25.09.01 since 2000; None if a name has no release."""
    release = re.search(r"(\d\d)\.(\d\d)(?:\.(\d+))?", name)
    if not release:
        return None
    year, month, patch = (int(part or 0) for part in release.groups())
    return 12.0 * year + month + patch / 100


def _profile_name(row: Row) -> str | None:
    """Name a row's stack and release, known or not; None for an unknown framework."""
    if row.group == "megatron-ci-golden/small":
        # The tests' names say how attention runs. Without Transformer Engine, and in deterministic runs that do not
        # resume, it is not fused and writes its scores; with context parallelism it always is flash attention.
        name = row["model"]
        plain = "te" not in name.split("_") and not row.moe
        unfused = plain or ("deterministic" in row["options"] and "resume" not in name)
        return "megatron-core-unfused" if unfused and (row.count("cp") or 1) == 1 else "megatron-core-dropout"
    ran = [(stack, run) for stack in STACKS.values() for run in stack.runs if _is_of(row, run)]
    if not ran:
        return None
    # A source is more specific than a framework, and more patterns are more specific than fewer.
    stack, run = max(ran, key=lambda item: ("source_family" in item[1], sum(map(len, item[1].values()))))
    if "release" not in run:
        return stack.name
    prefix, newest = run["release"]
    return prefix + (_release(row["framework_version"])[: len(newest) or None] or newest or row["framework_version"])


def _is_of(row: Row, run: Mapping[str, Sequence[str]]) -> bool:
    """Whether a row matches a stack's patterns. Keys: `column` or `not_column`, with patterns of the cell; `since`,
    the earliest version; `several`, axes with more than one rank. `release` (prefix of the stack's name, release to
    assume for a version without one) matches every row."""
    tests: dict[str, Callable[[str], bool]] = {
        "since": lambda earliest: row["framework_version"] >= earliest,
        "several": lambda axis: (row.count(axis) or 1) > 1,
        "release": lambda _: True,
    }

    def holds(column: str, wanted: str) -> bool:
        if column in tests:
            return tests[column](wanted)
        name = column.removeprefix("not_")
        return fnmatchcase(row[name], wanted) is (name == column)

    return all(holds(column, wanted) for column, each in run.items() for wanted in each)


def _release(version: str) -> str:
    """Return the release in a version, such as 25.09 or 25.09.01; "" if there is none."""
    release = re.search(r"\d\d\.\d\d(?:\.\d+)?", version)
    return release.group() if release else ""


def number_format(row: Row) -> str:
    """Return the number format of a row's matrix products. Raises Unspecified for formats that are not modelled."""
    precision = row["precision"]
    if precision in ("bf16", "fp16"):
        return "bfloat16"
    if precision == "nvfp4":
        return precision
    formats = {"fp8-mx": "mxfp8", "fp8-block": "float8-block", "fp8-row": "float8-row", "fp8": "float8"}
    for prefix, name in formats.items():
        if precision.startswith(prefix):
            return name
    raise Unspecified(f"precision {precision} is not modelled" if precision else "the precision is not stated")


_MODULES = {"norm": "layernorm", "act": "moe_act", "shared_expert": "shared_experts"}
"""Modules as rows name them, and as Megatron-Core does."""


def named_modules(row: Row) -> str:
    """Return the `recompute` of a row that names the recomputed modules; "" for one that does not."""
    kind, colon, words = row["act_ckpt"].partition(":")
    if kind != "selective" or not colon:
        return ""
    return "selective:" + "+".join(_MODULES.get(word.strip(), word.strip()) for word in words.split(","))


def recomputation(row: Row) -> str:
    """Return the `recompute` of a row's strategy. Blank counts as none: NVIDIA's tables leave it out for tuned runs.
    Raises Unspecified for kinds that are not modelled."""
    words = row["act_ckpt"]
    if words in ("", "none") or row.group in _REPEATED_NOTHING:
        return "none"
    if words.startswith("full"):
        return "full"
    if words.startswith("selective"):
        return "every:2" if "2nd layer" in words else "selective"
    raise Unspecified(f"recomputation {words!r} is not modelled")
