"""Options of published recipes beyond their layout: what they recompute, offload and overlap.

Tables of performance leave these out; NVIDIA's are in the recipes' own sources, Megatron-Bridge v0.5.0 (release
26.06), scripts/performance/configs/*/*workload_base_configs.py, whose lines are named here. A recipe of another
release is priced with the same options.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.spec.rows import Rows, record
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, StackOptions
from phalanx.validate.records import Row

MODULES = "recomputation by module"
SOME_BLOCKS = "recomputation of some blocks"
OFFLOAD = "offloading"


@dataclass(frozen=True)
class _Recipes:
    """Recipes of one framework with the same options. Empty fields say nothing; the first that has a row counts."""

    framework: str
    """How the framework's name begins."""
    model: str
    """How the model's name begins, in small letters."""
    line: str
    """Where the recipe stands: file:line."""
    recompute: str = ""
    """The `recompute` of its strategy; empty: as the row says."""
    options: StackOptions = AS_RELEASED
    chips: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    sharding: str = ""
    """A word of the column."""
    unknown: str = ""
    """The option that it is known to use, where its value is not known."""

    def has(self, row: Row) -> bool:
        """Whether a row is one of these recipes."""
        return (
            row["framework"].startswith(self.framework)
            and row["model"].lower().startswith(self.model)
            and (not self.chips or row["gpu"].split("-")[0] in self.chips)
            and (not self.formats or row["precision"] in self.formats)
            and self.sharding in row["sharding"]
        )


_KNOWN = Rows(Path(__file__).with_suffix(".toml"), record(_Recipes, "line"))
_WORDS = {"norm": "layernorm", "act": "moe_act", "shared_expert": "shared_experts"}
"""Modules as rows name them, and as Megatron-Core does."""


def options_of(row: Row, s: Strategy) -> tuple[Strategy, StackOptions]:
    """Return a row's strategy with what its recipe recomputes, and its other options, as far as these are known."""
    kind, colon, words = row["act_ckpt"].partition(":")
    if kind == "selective" and colon:
        named = "+".join(_WORDS.get(word.strip(), word.strip()) for word in words.split(","))
        return replace(s, recompute=f"selective:{named}"), AS_RELEASED
    recipe = _recipe(row)
    if recipe is None:
        return s, AS_RELEASED
    return (replace(s, recompute=recipe.recompute) if recipe.recompute else s), recipe.options


def option(row: Row) -> str:
    """Name the option that a recipe uses beyond its layout to save memory; empty if there is none, or none that is
    known."""
    if row["act_ckpt"].startswith("selective:"):
        return MODULES
    if "offload" in f"{row['options']} {row['notes']}".lower().replace("recompute/offload not in table", ""):
        return OFFLOAD
    recipe = _recipe(row)
    if recipe is None:
        return ""
    if recipe.options.activation_offload:
        return OFFLOAD
    return recipe.unknown or (MODULES if recipe.recompute.startswith("selective") else SOME_BLOCKS)


def _recipe(row: Row) -> _Recipes | None:
    return next((recipes for recipes in _KNOWN.values() if recipes.has(row)), None)


def overlaps_experts(row: Row) -> bool:
    """Whether a recipe overlaps the exchange of tokens with another micro-batch's compute: as its row states, or its
    source (Megatron-Bridge, scripts/performance/configs: 0132842, deepseek/deepseek_llm_pretrain.py:167 and 195, of
    release 25.09; v0.5.0, deepseek/deepseek_workload_base_configs.py:251). Constants of releases from 26.06 on, whose
    recipes do so too, are fitted on runs that do."""
    if "EP overlap" in row["options"]:
        return True
    if row["framework"] != "Megatron-Bridge" or row["model"] != "deepseek-v3":
        return False
    layout = (row["framework_version"], row["gpu"].split("-")[0], row["ep"])
    return layout in (("NeMo 25.09", "H100", "64"), ("NeMo 26.04.01", "B200", "32"))
