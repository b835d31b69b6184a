"""DeepSpeed, nanotron, MaxText, and Phalanx's own runtime."""

from __future__ import annotations

from phalanx.frameworks.stack import Facts, Rule, Stack, entries
from phalanx.spec.strategy.spec import FIELDS

_ZERO = "deepspeed/runtime/zero/config.py"
_CONFIG = "deepspeed/runtime/config.py"
_MODULE = "deepspeed/runtime/pipe/module.py"
_DEEPSPEED: Facts = {
    "dp": (None, "world size / (tp x pp x sequence_parallel_size)"),
    "zero": (None, "zero_optimization.stage"),
    "shard": (None, "zero_optimization.mics_shard_size"),
    "tp": (None, "tensor_parallel.autotp_size"),
    "sp": ((False,), ""),
    "cp": (None, "sequence_parallel_size"),
    "ulysses": (None, "sequence_parallel_size", "all of cp: DistributedAttention exchanges heads"),
    "ep": (None, "MoE(ep_size=...)"),
    "etp": (None, "MoE(enable_expert_tensor_parallelism=True)"),
    "pp": (None, "PipelineModule(num_stages=...)"),
    "virtual": ((1,), ""),
    "schedule": (("1f1b",), ""),
    "layers": (None, "PipelineModule(partition_method=...)"),
    "micro_batch": (None, "train_micro_batch_size_per_gpu"),
    "recompute": (
        ("none", "full", "uniform:*"),
        "gradient checkpointing of the model; PipelineModule(activation_checkpoint_interval=...)",
    ),
    "compression": (("none",), ""),
    "grad_sync": (("step", "micro"), "", "micro from level 2 on"),
    "reshard": (("action",), ""),
    "bucket": (None, "zero_optimization.reduce_bucket_size", "in elements"),
    "prefetch": ((1,), "zero_optimization.stage3_prefetch_bucket_size", "in elements"),
    "order": (("pp/dp/cp/tp",), ""),
}
_DEEPSPEED_LINES = {
    "dp": f"{_CONFIG}:714",
    "zero": f"{_ZERO}:95",
    "shard": f"{_ZERO}:341",
    "tp": "deepspeed/runtime/tensor_parallel/config.py:45",
    "sp": "deepspeed/runtime/tensor_parallel/config.py:13",
    "cp": f"{_CONFIG}:721",
    "ulysses": "deepspeed/sequence/layer.py:351",
    "ep": "deepspeed/moe/layer.py:42",
    "etp": "deepspeed/moe/layer.py:34",
    "pp": f"{_MODULE}:110",
    "virtual": "deepspeed/runtime/pipe/schedule.py:189",
    "schedule": "deepspeed/runtime/pipe/schedule.py:189",
    "layers": f"{_MODULE}:116",
    "micro_batch": "deepspeed/runtime/constants.py:95",
    "recompute": f"{_MODULE}:134",
    "compression": f"{_ZERO}:325",
    "grad_sync": "deepspeed/runtime/zero/stage_1_and_2.py:1768",
    "reshard": f"{_ZERO}:238",
    "bucket": f"{_ZERO}:113",
    "prefetch": f"{_ZERO}:215",
    "order": "deepspeed/runtime/pipe/topology.py:248",
}
_DEEPSPEED_OPTIONS: Facts = {
    "first_moment": (("auto", "float32", "bfloat16"), "bf16.bf16_optimizer_states"),
    "second_moment": (("auto", "float32", "bfloat16"), "bf16.bf16_optimizer_states"),
    "gradients": (None, "data_types.grad_accum_dtype"),
    "reduce": (None, "communication_data_type"),
    "optimizer": (("auto", "adam", "muon"), "optimizer.type"),
    "optimizer_offload": (None, "zero_optimization.offload_optimizer"),
    "parameter_offload": (None, "zero_optimization.offload_param"),
    "cross_entropy": (("auto", "plain", "linear"), "TiledFusedLogitsLoss", "", True),
}
_DEEPSPEED_OPTION_LINES = {
    "first_moment": "deepspeed/runtime/base_optimizer.py:487",
    "second_moment": "deepspeed/runtime/base_optimizer.py:487",
    "gradients": f"{_CONFIG}:896",
    "reduce": f"{_CONFIG}:805",
    "optimizer": f"{_CONFIG}:82",
    "optimizer_offload": "deepspeed/runtime/zero/offload_config.py:99",
    "parameter_offload": f"{_ZERO}:157",
    "cross_entropy": "deepspeed/runtime/sequence_parallel/ulysses_sp.py:1065",
}
DEEPSPEED = Stack(
    name="deepspeed",
    title="DeepSpeed 0.19",
    repository="deepspeedai/DeepSpeed",
    commit="edaa7221267243c7be7fb49c5d5f5c4fb97b4641",
    constants="deepspeed",
    strategy=entries(_DEEPSPEED, _DEEPSPEED_LINES),
    options=entries(_DEEPSPEED_OPTIONS, _DEEPSPEED_OPTION_LINES),
    rules=(
        Rule(
            "pp>1, zero>1",
            "the pipeline engine takes ZeRO up to level 1",
            "use zero=1, or pp=1",
            "deepspeed/runtime/pipe/engine.py:76",
        ),
        Rule(
            "ring>1",
            "its sequence parallelism exchanges tokens for heads, without a ring",
            "use ulysses=cp",
            "deepspeed/sequence/layer.py:351",
        ),
        Rule(
            "zero in (1, 2), dp_shard<dp",
            "fewer shards than replicas are MiCS, of level 3",
            "use zero=3, or leave shard out",
            f"{_ZERO}:341",
        ),
        Rule("parameter_offload=1, zero<3", "only level 3 shards parameters", "use zero=3", f"{_ZERO}:157"),
        Rule(
            "optimizer_offload>0, zero=0",
            "the optimizer's state is offloaded as shards",
            "use zero=1 or more",
            "deepspeed/runtime/zero/offload_config.py:99",
        ),
    ),
)

_ARGS = "src/nanotron/config/parallelism_config.py"
_NANOTRON: Facts = {
    "dp": (None, "parallelism.dp"),
    "zero": ((0, 1), "optimizer.zero_stage"),
    "shard": ((), ""),
    "tp": (None, "parallelism.tp"),
    "sp": (None, "parallelism.tp_mode = REDUCE_SCATTER"),
    "cp": (None, "parallelism.context_parallel_size"),
    "ulysses": ((1,), ""),
    "ep": ((1,), "", "the mesh of ranks has no room for another axis: ep x pp x dp x cp x tp must be the world"),
    "etp": ((1,), ""),
    "pp": (None, "parallelism.pp"),
    "virtual": ((1,), ""),
    "schedule": (("gpipe", "1f1b"), "parallelism.pp_engine = afab | 1f1b"),
    "layers": (("auto",), "", "blocks are balanced by their work, the head counted"),
    "micro_batch": (None, "tokens.micro_batch_size"),
    "recompute": (("none", "full"), "parallelism.recompute_layer"),
    "compression": (("none",), ""),
    "grad_sync": (("step",), ""),
    "reshard": ((), ""),
    "bucket": (None, "model.ddp_bucket_cap_mb"),
    "prefetch": ((1,), ""),
    "order": (("pp/dp/cp/tp",), ""),
}
_NANOTRON_LINES = {
    "dp": f"{_ARGS}:29",
    "zero": "src/nanotron/config/config.py:409",
    "shard": "src/nanotron/helpers.py:409",
    "tp": f"{_ARGS}:31",
    "sp": f"{_ARGS}:33",
    "cp": f"{_ARGS}:39",
    "ulysses": f"{_ARGS}:39",
    "ep": "src/nanotron/parallel/context.py:26",
    "etp": f"{_ARGS}:38",
    "pp": f"{_ARGS}:30",
    "virtual": f"{_ARGS}:30",
    "schedule": f"{_ARGS}:32",
    "layers": "src/nanotron/models/base.py:187",
    "micro_batch": "src/nanotron/config/config.py:345",
    "recompute": f"{_ARGS}:35",
    "compression": "src/nanotron/config/config.py:412",
    "grad_sync": "src/nanotron/parallel/pipeline_parallel/engine.py:235",
    "reshard": "src/nanotron/helpers.py:409",
    "bucket": "src/nanotron/config/config.py:313",
    "prefetch": "src/nanotron/helpers.py:409",
    "order": "src/nanotron/parallel/context.py:62",
}
NANOTRON = Stack(
    name="nanotron",
    title="nanotron",
    repository="huggingface/nanotron",
    commit="2411b022a75fb7f7561a1bb4166706da5e1b76de",
    constants="nanotron",
    strategy=entries(_NANOTRON, _NANOTRON_LINES),
    options=entries(
        {
            "gradients": (None, "optimizer.accumulate_grad_in_fp32"),
            "tp_overlap": (("auto", "none", "async"), "parallelism.tp_linear_async_communication"),
        },
        {"gradients": "src/nanotron/config/config.py:412", "tp_overlap": f"{_ARGS}:34"},
    ),
)

_TYPES = "src/maxtext/configs/types.py"
_MAXTEXT: Facts = {
    "dp": (None, "ici_ and dcn_ data_parallelism x fsdp_parallelism"),
    "zero": ((0, 1, 3), "fsdp_parallelism; shard_optimizer_over_data"),
    "shard": (None, "fsdp_parallelism; data_parallelism replicates"),
    "tp": (None, "ici_tensor_parallelism"),
    "sp": (None, "ici_tensor_sequence_parallelism"),
    "cp": (None, "ici_context_parallelism"),
    "ulysses": ((1,), "", "context_parallel_strategy = ulysses and usp run on TPUs alone"),
    "ep": (None, "ici_expert_parallelism"),
    "etp": ((1,), ""),
    "pp": (None, "ici_pipeline_parallelism"),
    "virtual": ((1,), "num_pipeline_repeats"),
    "schedule": (("gpipe",), "", "a scan over micro-batches: all forward passes, then all backward passes"),
    "layers": (("auto",), "num_layers_per_pipeline_stage"),
    "micro_batch": (None, "per_device_batch_size"),
    "recompute": (("none", "full"), "remat_policy"),
    "compression": (("none",), ""),
    "grad_sync": (("step", "micro"), ""),
    "reshard": (("action",), ""),
    "bucket": ((), ""),
    "prefetch": ((1,), ""),
    "order": (("pp/dp/cp/tp",), ""),
}
_MAXTEXT_LINES = {
    "dp": f"{_TYPES}:1245",
    "zero": f"{_TYPES}:1206",
    "shard": f"{_TYPES}:1246",
    "tp": f"{_TYPES}:1254",
    "sp": f"{_TYPES}:1255",
    "cp": f"{_TYPES}:1249",
    "ulysses": f"{_TYPES}:4073",
    "ep": f"{_TYPES}:1258",
    "etp": f"{_TYPES}:1258",
    "pp": f"{_TYPES}:1257",
    "virtual": f"{_TYPES}:1269",
    "schedule": f"{_TYPES}:1257",
    "layers": f"{_TYPES}:1268",
    "micro_batch": f"{_TYPES}:1400",
    "recompute": f"{_TYPES}:1292",
    "compression": f"{_TYPES}:439",
    "grad_sync": "src/maxtext/utils/gradient_accumulation.py:73",
    "reshard": f"{_TYPES}:1281",
    "bucket": f"{_TYPES}:1246",
    "prefetch": f"{_TYPES}:1246",
    "order": "src/maxtext/configs/base.yml:531",
}
_MAXTEXT_OPTIONS: Facts = {
    "products": (("auto", "bfloat16", "float8-delayed", "float8", "float8-mx"), "quantization"),
    "first_moment": (("auto", "float32", "bfloat16"), "mu_dtype"),
    "optimizer": (("auto", "adam", "muon"), "opt_type"),
    "optimizer_offload": ((0.0, 1.0), "optimizer_memory_host_offload"),
    "parameter_offload": (None, "parameter_memory_host_offload"),
    "context": (("auto", "p2p", "all_gather"), "context_parallel_strategy"),
    "cross_entropy": (("auto", "plain", "linear"), "num_vocab_tiling"),
    "document": (None, "packing"),
    "mtp": (None, "mtp_num_layers"),
}
_MAXTEXT_OPTION_LINES = {
    "products": f"{_TYPES}:455",
    "first_moment": f"{_TYPES}:1942",
    "optimizer": f"{_TYPES}:1862",
    "optimizer_offload": f"{_TYPES}:1363",
    "parameter_offload": f"{_TYPES}:1364",
    "context": f"{_TYPES}:1128",
    "cross_entropy": f"{_TYPES}:586",
    "document": f"{_TYPES}:1414",
    "mtp": f"{_TYPES}:560",
}
MAXTEXT = Stack(
    name="maxtext",
    title="MaxText 0.2 on GPUs",
    repository="AI-Hypercomputer/maxtext",
    commit="e591f30cbbf217ed67ef71263ec0538239f9c3b8",
    constants="maxtext",
    strategy=entries(_MAXTEXT, _MAXTEXT_LINES),
    options=entries(_MAXTEXT_OPTIONS, _MAXTEXT_OPTION_LINES),
    rules=(
        *(
            Rule(
                f"products={kind}, micro_batches>1, pp=1",
                "FP8 with delayed scaling excludes gradient accumulation",
                "use one micro-batch, or products=bfloat16",
                f"{_TYPES}:3882",
            )
            for kind in ("float8-delayed",)
        ),
        Rule(
            "parameter_offload=1, zero<3",
            "parameters are offloaded as shards",
            "use zero=3",
            f"{_TYPES}:1364",
        ),
        Rule(
            "zero=1, dp_shard<dp",
            "shard_optimizer_over_data shards over all replicas",
            "use zero=3, or leave shard out",
            f"{_TYPES}:1206",
        ),
    ),
)

_LEGALITY = "src/phalanx/spec/strategy/legality.py"
PHALANX = Stack(
    name="phalanx",
    title="Phalanx",
    repository="phalanx",
    commit="e9070f8bd2ba8563965520501834d9fa09b0a99a",
    constants="phalanx",
    strategy=entries(
        {
            **{name: (None, f"--strategy {name}=") for name in FIELDS},
            "recompute": (("none", "selective", "full", "every:*"), "--strategy recompute="),
            "prefetch": ((0, 1), "--strategy prefetch="),
            "order": (("pp/dp/cp/tp",), "--strategy order=", "a search of its own keeps the default"),
        },
        {name: f"{_LEGALITY}:86" for name in FIELDS} | {"order": "src/phalanx/planning/search/best_first.py:36"},
    ),
    options=entries(
        {"optimizer": (("auto", "adam"), "[job.optimizer] name")},
        {"optimizer": "src/phalanx/spec/job.py:76"},
    ),
)
