"""Options of published recipes that a Strategy cannot express and that save memory, so that a prediction of the same
layout without them says too much.

Tables of performance leave these out; NVIDIA's are in the recipes' own sources, Megatron-Bridge v0.2.0 to v0.5.0,
scripts/performance/configs/*/*workload_base_configs.py (releases 25.11 to 26.06).
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.validate.records import Row

MODULES = "recomputation by module"
SOME_BLOCKS = "recomputation of some blocks"
OFFLOAD = "offloading"


@dataclass(frozen=True)
class _Recipes:
    """Recipes of one framework that use an option. Empty fields say nothing."""

    framework: str
    """How the framework's name begins."""
    model: str
    """How the model's name begins, in small letters."""
    option: str
    source: str
    """The field in the source."""
    chips: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    sharding: str = ""
    """A word of the column."""

    def has(self, row: Row) -> bool:
        """Whether a row is one of these recipes."""
        return (
            row["framework"].startswith(self.framework)
            and row["model"].lower().startswith(self.model)
            and (not self.chips or row["gpu"].split("-")[0] in self.chips)
            and (not self.formats or row["precision"] in self.formats)
            and self.sharding in row["sharding"]
        )


_BLACKWELL = ("B200", "GB200", "GB300")
_KNOWN = (
    _Recipes("Megatron-Bridge", "deepseek-v3", MODULES, "recompute_modules: mla_up_proj, mlp or moe_act"),
    _Recipes("Megatron-Bridge", "kimi", MODULES, "recompute_modules: mla_up_proj, mlp"),
    _Recipes("Megatron-Bridge", "gpt-oss-120b", MODULES, "recompute_modules: layernorm, moe_act"),
    _Recipes("Megatron-Bridge", "nemotron_3", MODULES, "recompute_modules: moe, moe_act, layernorm, core_attn"),
    _Recipes("Megatron-Bridge", "llama3-70b", OFFLOAD, "cpu_offloading_num_layers: 5 to 40", _BLACKWELL, (), "FSDP"),
    _Recipes("Megatron-Bridge", "llama3.1-405b", OFFLOAD, "cpu_offloading_num_layers: 10 to 92", (), (), "FSDP"),
    _Recipes("Megatron-Bridge", "llama3.1-405b", SOME_BLOCKS, "recompute_num_layers: 1", _BLACKWELL, ("nvfp4",)),
    _Recipes("Megatron-Bridge", "llama3-8b", SOME_BLOCKS, "recompute_num_layers: 5", ("H100",), ("fp8-cs",), "FSDP"),
)


def unexpressed(row: Row) -> str:
    """Name the option of a row that a Strategy cannot express and that saves memory; empty if there is none, or none
    that is known."""
    if row["act_ckpt"].startswith("selective:"):
        return MODULES
    if "offload" in f"{row['options']} {row['notes']}".lower().replace("recompute/offload not in table", ""):
        return OFFLOAD
    return next((recipes.option for recipes in _KNOWN if recipes.has(row)), "")
