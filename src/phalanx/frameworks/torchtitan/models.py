"""The models of torchtitan that are known here, by module and flavor."""

from phalanx.spec.model import presets

PRESETS = {
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3-405b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}
"""The preset (spec/model/presets.py) of each (module, flavor)."""
FLAVORS = {
    tuple(presets.PRESETS[name][size] for size in ("family", "layers", "hidden", "vocab")): flavor
    for flavor, name in PRESETS.items()
}
"""(module, flavor) by (family, layers, hidden, vocab)."""
