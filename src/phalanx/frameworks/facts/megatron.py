"""Megatron-Core by its own arguments, two releases: DistributedOptimizer (ZeRO-1), 1F1B and interleaved pipelines.

Its parallel_state lays ranks out as tp, cp, ep, dp, pp from the innermost, or with --use-tp-pp-dp-mapping as tp, cp,
ep, pp, dp: the two orders of the mesh that a search knows.
"""

from __future__ import annotations

from phalanx.frameworks.stack import Facts, Rule, Stack, entries

_ARGUMENTS = "megatron/training/arguments.py"
_TRANSFORMER = "megatron/core/transformer/transformer_config.py"
_PARALLEL = "megatron/core/model_parallel_config.py"
_DDP = "megatron/core/distributed/distributed_data_parallel_config.py"
_SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"

STATE = ("auto", "float32", "float16", "bfloat16", "float8")
STRATEGY: Facts = {
    "dp": (None, "world size / (tp x pp x cp)"),
    "zero": ((0, 1), "--use-distributed-optimizer"),
    "shard": (None, "--num-distributed-optimizer-instances DP/SHARD"),
    "tp": (None, "--tensor-model-parallel-size"),
    "sp": (None, "--sequence-parallel"),
    "cp": (None, "--context-parallel-size"),
    "ulysses": (None, "--cp-comm-type a2a | a2a+p2p --hierarchical-context-parallel-sizes ULYSSES RING"),
    "ep": (None, "--expert-model-parallel-size"),
    "etp": (None, "--expert-tensor-parallel-size"),
    "pp": (None, "--pipeline-model-parallel-size"),
    "virtual": (None, "--num-virtual-stages-per-pipeline-rank"),
    "schedule": (("1f1b", "interleaved"), "", "interleaved where there are virtual stages, else 1f1b"),
    "layers": (None, "--pipeline-model-parallel-layout", "auto: nothing where blocks divide evenly, else the layout"),
    "micro_batch": (None, "--micro-batch-size"),
    "recompute": (
        ("none", "full", "selective", "selective:*", "block:*", "uniform:*"),
        "--recompute-granularity, --recompute-method, --recompute-num-layers, --recompute-modules",
    ),
    "compression": (("none",), ""),
    "grad_sync": (("step",), "", "no_sync until the last backward pass"),
    "reshard": ((), ""),
    "bucket": (None, "--ddp-bucket-size", "in parameters; auto: max(40e6, 1e6 dp)"),
    "prefetch": ((1,), ""),
    "order": (("pp/dp/cp/tp", "dp/pp/cp/tp"), "--use-tp-pp-dp-mapping"),
}
OPTIONS: Facts = {
    "first_stage_layers": (None, "--decoder-first-pipeline-num-layers"),
    "last_stage_layers": (None, "--decoder-last-pipeline-num-layers"),
    "embedding_as_layer": (None, "--account-for-embedding-in-pipeline-split"),
    "loss_as_layer": (None, "--account-for-loss-in-pipeline-split"),
    "products": (None, "--fp8-format, --fp8-recipe; --fp4-format"),
    "narrow_parameters": (None, "--fp8-param-gather; --fp4-param-gather"),
    "first_moment": (STATE, "--use-precision-aware-optimizer --exp-avg-dtype"),
    "second_moment": (STATE, "--use-precision-aware-optimizer --exp-avg-sq-dtype"),
    "master": (None, "--use-precision-aware-optimizer --main-params-dtype"),
    "gradients": (None, "--accumulate-allreduce-grads-in-fp32; --main-grads-dtype"),
    "reduce": (None, "--grad-reduce-in-bf16"),
    "optimizer": (("auto", "adam", "muon"), "--optimizer"),
    "optimizer_offload": (None, "--optimizer-cpu-offload --optimizer-offload-fraction"),
    "activation_offload": (None, "cpu_offloading, cpu_offloading_num_layers"),
    "context": (None, "--cp-comm-type p2p | all_gather"),
    "cross_entropy": (("auto", "plain", "fused"), "--cross-entropy-loss-fusion"),
    "document": (None, "--sft", "sequences are packed as THD"),
    "mtp": (None, "--mtp-num-layers"),
    "tp_overlap": (("auto", "none", "userbuffers"), "--tp-comm-overlap"),
    "dispatch": (None, "--moe-token-dispatcher-type allgather | alltoall | flex"),
    "overlap_experts": (None, "--overlap-moe-expert-parallel-comm"),
}
_LINES_19 = {
    "dp": f"{_ARGUMENTS}:446",
    "zero": f"{_ARGUMENTS}:2997",
    "shard": f"{_ARGUMENTS}:3049",
    "tp": f"{_PARALLEL}:55",
    "sp": f"{_PARALLEL}:94",
    "cp": f"{_PARALLEL}:100",
    "ulysses": f"{_ARGUMENTS}:3054",
    "ep": f"{_PARALLEL}:127",
    "etp": f"{_PARALLEL}:130",
    "pp": f"{_PARALLEL}:83",
    "virtual": f"{_ARGUMENTS}:2963",
    "schedule": f"{_SCHEDULES}:48",
    "layers": f"{_ARGUMENTS}:2950",
    "micro_batch": "megatron/training/config/training_config.py:11",
    "recompute": f"{_TRANSFORMER}:529",
    "compression": f"{_DDP}:12",
    "grad_sync": f"{_SCHEDULES}:741",
    "reshard": f"{_DDP}:12",
    "bucket": f"{_ARGUMENTS}:2972",
    "prefetch": f"{_DDP}:21",
    "order": "megatron/training/initialize.py:388",
    "first_stage_layers": f"{_ARGUMENTS}:2942",
    "last_stage_layers": f"{_ARGUMENTS}:2946",
    "embedding_as_layer": f"{_TRANSFORMER}:130",
    "loss_as_layer": f"{_TRANSFORMER}:134",
    "products": f"{_TRANSFORMER}:573",
    "narrow_parameters": f"{_ARGUMENTS}:1935",
    "first_moment": f"{_ARGUMENTS}:3508",
    "second_moment": f"{_ARGUMENTS}:3513",
    "master": f"{_ARGUMENTS}:3506",
    "gradients": f"{_ARGUMENTS}:2921",
    "reduce": f"{_ARGUMENTS}:2905",
    "optimizer": f"{_ARGUMENTS}:2776",
    "optimizer_offload": f"{_ARGUMENTS}:2785",
    "activation_offload": f"{_PARALLEL}:461",
    "context": f"{_ARGUMENTS}:3054",
    "cross_entropy": f"{_PARALLEL}:320",
    "document": f"{_ARGUMENTS}:3606",
    "mtp": f"{_TRANSFORMER}:68",
    "tp_overlap": f"{_PARALLEL}:265",
    "dispatch": f"{_TRANSFORMER}:862",
    "overlap_experts": f"{_PARALLEL}:343",
}
_LINES_14 = {
    "dp": f"{_ARGUMENTS}:372",
    "zero": f"{_ARGUMENTS}:2412",
    "shard": f"{_ARGUMENTS}:2447",
    "tp": f"{_PARALLEL}:19",
    "sp": f"{_PARALLEL}:38",
    "cp": f"{_PARALLEL}:44",
    "ulysses": f"{_ARGUMENTS}:2457",
    "ep": f"{_PARALLEL}:55",
    "etp": f"{_PARALLEL}:58",
    "pp": f"{_PARALLEL}:27",
    "virtual": f"{_ARGUMENTS}:2343",
    "schedule": f"{_SCHEDULES}:40",
    "layers": f"{_ARGUMENTS}:2330",
    "micro_batch": f"{_ARGUMENTS}:1746",
    "recompute": f"{_TRANSFORMER}:287",
    "compression": f"{_DDP}:8",
    "grad_sync": f"{_SCHEDULES}:570",
    "reshard": f"{_DDP}:8",
    "bucket": f"{_ARGUMENTS}:2374",
    "prefetch": f"{_DDP}:17",
    "order": f"{_ARGUMENTS}:2474",
    "first_stage_layers": f"{_ARGUMENTS}:2322",
    "last_stage_layers": f"{_ARGUMENTS}:2326",
    "embedding_as_layer": f"{_ARGUMENTS}:2406",
    "loss_as_layer": f"{_ARGUMENTS}:2409",
    "products": f"{_TRANSFORMER}:327",
    "narrow_parameters": f"{_ARGUMENTS}:1248",
    "first_moment": f"{_ARGUMENTS}:3024",
    "second_moment": f"{_ARGUMENTS}:3029",
    "master": f"{_ARGUMENTS}:3022",
    "gradients": f"{_ARGUMENTS}:2300",
    "reduce": f"{_ARGUMENTS}:2279",
    "optimizer": f"{_ARGUMENTS}:1969",
    "optimizer_offload": f"{_ARGUMENTS}:1974",
    "context": f"{_ARGUMENTS}:2457",
    "cross_entropy": f"{_PARALLEL}:215",
    "document": f"{_ARGUMENTS}:3078",
    "mtp": f"{_TRANSFORMER}:47",
    "tp_overlap": f"{_PARALLEL}:160",
    "dispatch": f"{_TRANSFORMER}:509",
    "overlap_experts": f"{_ARGUMENTS}:2889",
}
# What 0.14 has not: Muon, NVFP4, HybridEP, and an argument for what its configuration calls cpu_offloading.
_IN_14: Facts = {
    "optimizer": (("auto", "adam"), "--optimizer"),
    "products": (("auto", "bfloat16", "float8-delayed", "float8", "float8-block", "float8-mx"), "--fp8-recipe"),
    "dispatch": (("auto", "all_gather", "all_to_all", "deepep"), "--moe-token-dispatcher-type, --moe-enable-deepep"),
}


def rules(at: dict[str, str]) -> tuple[Rule, ...]:
    """What Megatron's arguments refuse, with where they do (file:line by the name of the rule)."""
    return (
        Rule("tp>1, sp=0, experts>0", "experts over tp ranks need sequence parallelism", "use sp=1", at["moe_sp"]),
        Rule(
            "cp>1, seq%cp_chunks>0",
            "each cp rank takes two of 2 cp equal parts of a sequence",
            "use another cp",
            at["cp_seq"],
        ),
        Rule(
            "virtual>1, schedule=1f1b",
            "virtual stages run interleaved",
            "use schedule=interleaved, or virtual=1",
            at["virtual"],
        ),
        Rule(
            "pp>1, schedule=interleaved, micro_batches<pp",
            "interleaving needs a micro-batch for each pipeline rank",
            "use more micro-batches, or schedule=1f1b",
            at["virtual"],
        ),
        Rule(
            "activation_offload>0, pp>1",
            "activations are not offloaded with a pipeline",
            "use pp=1, or leave it out",
            at["offload_pp"],
        ),
        Rule(
            "activation_offload>0, recompute!=none",
            "activations are not offloaded while others are recomputed",
            "use recompute=none",
            at["offload_recompute"],
        ),
        Rule(
            "overlap_experts=on, pp>1, virtual=1",
            "overlapped all-to-alls need virtual stages in a pipeline",
            "use schedule=interleaved with virtual=2 or more",
            at["overlap_pp"],
        ),
        Rule(
            "overlap_experts=on, ep=1",
            "there is nothing to overlap without expert parallelism",
            "use ep=2 or more",
            at["overlap_ep"],
        ),
        *(
            Rule(
                f"overlap_experts=on, recompute={kind}",
                "overlapped all-to-alls exclude recomputation of blocks",
                "use recompute=none or modules other than moe",
                at["overlap_full"],
            )
            for kind in ("full", "block:*", "uniform:*", "selective:*moe", "selective:*moe+*")
        ),
        Rule(
            "tp_overlap=userbuffers, sp=0",
            "userbuffers overlap the collectives of sequence parallelism",
            "use sp=1",
            at["tp_overlap"],
        ),
        # On one replica it shards nothing, and an export turns it on (frameworks/megatron/write.py).
        *(
            Rule(
                f"zero=0, replicas>1, {option}!=auto, {option}!=float32",
                "narrow optimizer state needs the distributed optimizer",
                "use zero=1",
                at["precision"],
            )
            for option in ("first_moment", "second_moment", "master")
        ),
        *(
            Rule(
                f"zero=0, replicas>1, {condition}",
                "is part of the precision-aware optimizer, which needs the distributed optimizer",
                "use zero=1",
                at["precision"],
            )
            for condition in ("gradients=bfloat16", "optimizer_offload>0")
        ),
        *(
            Rule(
                f"{option}=1, pp>1, counted_blocks%chunks>0",
                "blocks, with the ends that count as blocks, must divide by pp x virtual",
                "use another virtual or pp, or first_stage_layers and last_stage_layers",
                at["layers"],
            )
            for option in ("embedding_as_layer", "loss_as_layer")
        ),
        *(
            Rule(
                f"{option}>0, pp>1, {what}>0",
                "given and remaining blocks must divide by the virtual stages of their ranks",
                "use other numbers",
                at["middle"],
            )
            for option in ("first_stage_layers", "last_stage_layers")
            for what in (f"{option}%virtual", "middle_blocks%middle_chunks")
        ),
        *(
            Rule(
                f"products=float8-delayed, recompute=selective:*{module}*",
                "scales of earlier steps are not kept for outputs that run again",
                f"leave {module} out, or use products=float8",
                at["delayed"],
            )
            for module in ("moe_act", "layernorm")
        ),
        Rule(
            "recompute=selective:*moe_act*, experts=0",
            "the model has no experts",
            "leave moe_act out",
            at["moe_act"],
        ),
    )


def narrow_parameters(at: str) -> Rule:
    """Return the rule about parameters gathered in 8 bits, which a release has `at` file:line."""
    reason = "parameters are gathered in 8 bits by the distributed optimizer"
    return Rule("zero=0, replicas>1, narrow_parameters=on", reason, "use zero=1", at)


_RULES_19 = {
    "moe_sp": "megatron/core/transformer/moe/moe_layer.py:629",
    "cp_seq": f"{_ARGUMENTS}:1296",
    "virtual": f"{_SCHEDULES}:1134",
    "offload_pp": f"{_TRANSFORMER}:1714",
    "offload_recompute": f"{_TRANSFORMER}:1719",
    "overlap_pp": f"{_TRANSFORMER}:2677",
    "overlap_ep": f"{_TRANSFORMER}:2682",
    "overlap_full": f"{_TRANSFORMER}:2690",
    "tp_overlap": f"{_ARGUMENTS}:1402",
    "precision": "megatron/core/optimizer/optimizer_config.py:434",
    "moe_act": f"{_TRANSFORMER}:1786",
    "delayed": f"{_TRANSFORMER}:1823",
    "layers": f"{_ARGUMENTS}:963",
    "middle": f"{_TRANSFORMER}:2045",
}
_RULES_14 = {
    "moe_sp": "megatron/core/transformer/moe/moe_layer.py:258",
    "cp_seq": f"{_ARGUMENTS}:758",
    "virtual": f"{_SCHEDULES}:981",
    "offload_pp": f"{_TRANSFORMER}:815",
    "offload_recompute": f"{_TRANSFORMER}:820",
    "overlap_pp": f"{_TRANSFORMER}:1306",
    "overlap_ep": f"{_TRANSFORMER}:1311",
    "overlap_full": f"{_TRANSFORMER}:1319",
    "tp_overlap": f"{_ARGUMENTS}:845",
    "precision": "megatron/core/optimizer/optimizer_config.py:219",
    "moe_act": f"{_TRANSFORMER}:886",
    "delayed": f"{_TRANSFORMER}:914",
    "layers": f"{_ARGUMENTS}:533",
    "middle": f"{_TRANSFORMER}:1054",
}
MODULES = ("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts")
_NEEDS = ("CUDA_DEVICE_MAX_CONNECTIONS=1 with tp or cp on GPUs before Blackwell",)

MEGATRON_CORE = Stack(
    name="megatron-core",
    title="Megatron-Core 0.19",
    repository="NVIDIA/Megatron-LM",
    commit="5be9626709af2722333bf54797c954c09edeada3",
    constants="megatron-core",
    strategy=entries(STRATEGY, _LINES_19),
    options=entries(OPTIONS, _LINES_19),
    rules=(*rules(_RULES_19), narrow_parameters(f"{_ARGUMENTS}:1061")),
    modules=MODULES,
    needs=_NEEDS,
)
MEGATRON_CORE_14 = Stack(
    name="megatron-core-0.14",
    title="Megatron-Core 0.14",
    repository="NVIDIA/Megatron-LM",
    commit="23e00ed0963c35382dfe8a5a94fb3cda4d21e133",
    constants="megatron-core",
    strategy=entries(STRATEGY, _LINES_14),
    options=entries({n: f for n, f in {**OPTIONS, **_IN_14}.items() if n in _LINES_14}, _LINES_14),
    rules=(
        *rules(_RULES_14),
        Rule(
            "tp>1, kv_heads%tp>0",
            "every tensor-parallel rank has key heads of its own",
            "use a tp that divides the key heads",
            f"{_TRANSFORMER}:696",
        ),
        narrow_parameters(f"{_ARGUMENTS}:617"),
    ),
    modules=MODULES,
    needs=_NEEDS,
)

_FSDP: Facts = {
    **STRATEGY,
    "zero": (
        None,
        "--use-megatron-fsdp --data-parallel-sharding-strategy no_shard | optim | optim_grads | ..._params",
    ),
    "grad_sync": (("step", "micro"), "", "micro from level 2 on: reduce-scatters in every backward pass"),
    "reshard": (("action",), ""),
    "order": (("pp/dp/cp/tp",), "", "--use-tp-pp-dp-mapping is refused"),
}
_FSDP_LINES = _LINES_19 | {
    "zero": f"{_ARGUMENTS}:3023",
    "grad_sync": "megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py:755",
    "reshard": f"{_ARGUMENTS}:3023",
}
MEGATRON_FSDP = Stack(
    name="megatron-fsdp",
    title="Megatron-FSDP (Megatron-Core 0.19)",
    repository="NVIDIA/Megatron-LM",
    commit="5be9626709af2722333bf54797c954c09edeada3",
    constants="megatron-core",
    strategy=entries(_FSDP, _FSDP_LINES),
    options=entries({name: fact for name, fact in OPTIONS.items() if name != "optimizer"}, _LINES_19),
    rules=rules(_RULES_19),
    modules=MODULES,
    needs=("CUDA_DEVICE_MAX_CONNECTIONS unset or more than 1",),
)
