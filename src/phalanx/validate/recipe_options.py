"""Options of published recipes beyond their layout: what they recompute, offload and overlap.

Tables of performance leave these out; NVIDIA's are in the recipes' own sources, Megatron-Bridge v0.5.0 (release
26.06), scripts/performance/configs/*/*workload_base_configs.py, whose lines are named here. A recipe of another
release is priced with the same options.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def _offload(blocks: int) -> StackOptions:
    return StackOptions(activation_offload=blocks)


_BRIDGE = "Megatron-Bridge"
_DEEPSEEK = "deepseek/deepseek_workload_base_configs.py"
_LLAMA = "llama/llama3_workload_base_configs.py"
_LLAMA31 = "llama/llama31_workload_base_configs.py"
_KIMI = "kimi/kimi_workload_base_configs.py"
_UP = "selective:mla_up_proj"
_UP_MLP = "selective:mla_up_proj+mlp"
_KNOWN = (
    _Recipes(_BRIDGE, "deepseek-v3", f"{_DEEPSEEK}:170", _UP_MLP, chips=("H100",)),
    _Recipes(_BRIDGE, "deepseek-v3", f"{_DEEPSEEK}:255", _UP_MLP, chips=("B200",), formats=("fp8-mx",)),
    _Recipes(_BRIDGE, "deepseek-v3", f"{_DEEPSEEK}:65", "selective:moe_act", chips=("GB300",), formats=("bf16",)),
    _Recipes(_BRIDGE, "deepseek-v3", f"{_DEEPSEEK}:89", "selective:mlp", chips=("GB200",), formats=("fp8-cs",)),
    _Recipes(_BRIDGE, "deepseek-v3", f"{_DEEPSEEK}:53", _UP),
    _Recipes(_BRIDGE, "kimi", f"{_KIMI}:104", _UP_MLP, chips=("H100",)),
    _Recipes(_BRIDGE, "kimi", f"{_KIMI}:38", _UP),
    _Recipes(_BRIDGE, "gpt-oss-120b", "gpt_oss/gpt_oss_workload_base_configs.py:130", "selective:layernorm+moe_act"),
    _Recipes(_BRIDGE, "nemotron_3", "nemotronh/nemotron_3_workload_base_configs.py:84", unknown=MODULES),
    _Recipes(_BRIDGE, "llama3-70b", f"{_LLAMA}:66", "", _offload(20), ("GB300",), ("fp8-cs",), "FSDP"),
    _Recipes(_BRIDGE, "llama3-70b", f"{_LLAMA}:57", "", _offload(30), ("GB300",), ("bf16",), "FSDP"),
    _Recipes(_BRIDGE, "llama3-70b", f"{_LLAMA}:96", "", _offload(40), ("GB200",), ("fp8-cs",), "FSDP"),
    _Recipes(_BRIDGE, "llama3-70b", f"{_LLAMA}:88", "", _offload(20), ("GB200",), ("bf16",), "FSDP"),
    _Recipes(_BRIDGE, "llama3.1-405b", f"{_LLAMA31}:40", "", _offload(40), ("GB300",), ("bf16",), "FSDP"),
    _Recipes(_BRIDGE, "llama3.1-405b", f"{_LLAMA31}:50", "", _offload(10), ("GB300",), ("fp8-cs",), "FSDP"),
    _Recipes(_BRIDGE, "llama3.1-405b", f"{_LLAMA31}:94", "", _offload(92), ("GB200",), ("fp8-cs",), "FSDP"),
    _Recipes(
        _BRIDGE, "llama3.1-405b", f"{_LLAMA31}:118", "block:1", chips=("B200", "GB200", "GB300"), formats=("nvfp4",)
    ),
    _Recipes(
        _BRIDGE,
        "llama3-8b",
        "llama/llama3_workload_base_configs.py:476",
        "block:5",
        chips=("H100",),
        formats=("fp8-cs",),
        sharding="FSDP",
    ),
)
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
    return next((recipes for recipes in _KNOWN if recipes.has(row)), None)


def overlaps_experts(row: Row) -> bool:
    """Whether a recipe exchanges tokens beside another micro-batch's compute: as its row states, or its source
    (Megatron-Bridge, scripts/performance/configs: 0132842, deepseek/deepseek_llm_pretrain.py:167 and 195, of release
    25.09; v0.5.0, deepseek/deepseek_workload_base_configs.py:251). Constants of releases from 26.06 on, whose recipes
    do so too, are fitted on runs that do."""
    if "EP overlap" in row["options"]:
        return True
    if row["framework"] != "Megatron-Bridge" or row["model"] != "deepseek-v3":
        return False
    layout = (row["framework_version"], row["gpu"].split("-")[0], row["ep"])
    return layout in (("NeMo 25.09", "H100", "64"), ("NeMo 26.04.01", "B200", "32"))
