"""The one table of torchtitan's keys and Phalanx's fields, for reading and for writing (torchtitan 0.3.0 on PyPI:
config/configs.py). `parallelism.data_parallel_shard_degree` is the shard group; replicas are a key of their own.
"""

from __future__ import annotations

FIELDS: dict[str, str] = {
    "parallelism.tensor_parallel_degree": "strategy.tp",
    "parallelism.enable_sequence_parallel": "strategy.sp",
    "parallelism.pipeline_parallel_degree": "strategy.pp",
    "parallelism.context_parallel_degree": "strategy.cp",
    "parallelism.expert_parallel_degree": "strategy.ep",
    "training.global_batch_size": "job.global_batch",
    "training.seq_len": "job.seq",
    "training.max_norm": "job.clip",
    "training.enable_cpu_offload": "options.parameter_offload",
    "compile.enable_async_tensor_parallel": "options.tp_overlap",
}
"""Key -> table.field, for values that are the same in both (tp_overlap: async)."""
WORDS: dict[str, tuple[str, dict[str, str]]] = {
    "parallelism.pipeline_parallel_schedule": (
        "strategy.schedule",
        {
            "GPipe": "gpipe",
            "1F1B": "1f1b",
            "Interleaved1F1B": "interleaved",
            "ZBVZeroBubble": "zb-v",
            "DualPipeV": "dualpipe-v",
        },
    ),
    "parallelism.fsdp_reshard_after_forward": ("strategy.zero", {"never": "2", "default": "3"}),
}
"""Key -> (table.field, {its word: the field's value})."""
KEY = {field: key for key, field in FIELDS.items()}
"""The key that holds a field's value."""
WORD = {field: (key, {value: word for word, value in words.items()}) for key, (field, words) in WORDS.items()}
"""The key of a field, and its word for each value."""
FLAVORS: dict[tuple[str, int, int, int], tuple[str, str]] = {
    ("llama", 32, 4096, 128256): ("llama3", "8B"),
    ("llama", 80, 8192, 128256): ("llama3", "70B"),
    ("llama", 126, 16384, 128256): ("llama3", "405B"),
    ("qwen3", 64, 5120, 151936): ("qwen3", "32B"),
    ("qwen3_moe", 48, 2048, 151936): ("qwen3", "30B-A3B"),
    ("deepseek_v2", 60, 5120, 102400): ("deepseek_v3", "236B"),
    ("deepseek_v3", 61, 7168, 129280): ("deepseek_v3", "671B"),
    ("gpt_oss", 24, 2880, 201088): ("gpt_oss", "20b"),
    ("gpt_oss", 36, 2880, 201088): ("gpt_oss", "120b"),
}
"""torchtitan's models, (module, flavor), by (family, layers, hidden, vocab): it has no others of these families."""
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
"""The preset (spec/model/presets.py) of each of these models."""
CONVERTERS = {
    "Float8LinearConverter": "float8-block",
    "MXFP8LinearConverter": "mxfp8",
    "NVFP4LinearConverter": "nvfp4",
}
"""Products that a converter of a model's linear layers makes."""
