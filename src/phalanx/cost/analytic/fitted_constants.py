"""Constants of stacks and chips, fitted to the published runs that ship with Phalanx.

Written by `python -m calibration --write`. Fields are documented in their classes (stacks.Profile, chips.Generation),
from whose defaults the fit starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CONSTANTS: dict[str, float] = {
    # links: nccl-tests of collectives.csv
    "nvidia.node_hop_s": 1.237e-06,
    "nvidia.node_bulk_s": 5.781e-06,
    "nvidia.net_hop_s": 5.024e-06,
    "nvidia.net_bulk_s": 1.38e-05,
    "nvidia.cloud_hop_s": 6.256e-05,
    "nvidia.cloud_bulk_s": 0.0004248,
    "nvidia.bulk_bytes": 3.051e05,
    "nvidia.bulk_reduce_bytes": 8.621e05,
    "nvidia.nic": 0.9009,
    "nvidia.nvlink": 0.7221,
    "ampere.nvlink": 0.7676,
    "ampere.start_s": 5e-05,
    "hopper.reduce_gain": 1.472,
    "blackwell.nvlink": 0.7426,
    "blackwell.reduce_gain": 1.264,
    # nvidia: all families on NVIDIA's chips
    "nvidia.gemm": 0.803,
    "nvidia.gemm8": 0.586,
    "nvidia.gemm_half": 229.7,
    "nvidia.misaligned": 0.1201,
    "nvidia.attention": 0.5925,
    "nvidia.attention_half": 496.4,
    "nvidia.memory": 0.7998,
    "nvidia.portable_attention": 0.3978,
    "nvidia.attention_backward": 0.8337,
    "nvidia.portable_backward": 0.7587,
    "nvidia.attention_narrow": 0.2006,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.9322,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9298,
    # GB300: nemo-megatron-bridge, against B300
    "GB300.clock": 1.064,
    # any: all families
    "any.hidden_bytes": 18.24,
    "any.ffn_bytes": 6.771,
    "any.backward_traffic": 1.556,
    "any.logit_bytes": 18.96,
    "any.launch_s": 3.302e-05,
    "any.launch_backward": 1.737,
    "any.launch_sync": 0.0777,
    "any.tp_overlap": 0.432,
    "any.dp_overlap": 0.7443,
    "any.gather_overlap": 0.5658,
    "any.ring_bytes": 22.57,
    "any.optimizer_bytes": 28.62,
    "any.step_s": 0.01047,
    "any.cast_bytes": 9.694,
    "any.fine_cast": 2.115,
    "any.token_bytes": 39.61,
    "any.grouped": 1.084,
    "any.router_s": 9.668e-05,
    "any.expert_s": 5.816e-05,
    "any.imbalance": 0.07979,
    "any.expert_launches": 48.88,
    "any.ep_overlap": 0.5455,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.7235,
    "ampere.gemm_half": 253.8,
    "ampere.attention": 0.5925,
    "ampere.portable_attention": 0.4869,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.6923,
    "hopper.gemm_half": 243.3,
    "hopper.attention": 0.6085,
    "hopper.portable_attention": 0.2847,
    "hopper.gemm8": 0.6047,
    "hopper.portable_gemm": 0.8211,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.6219,
    "blackwell.gemm_half": 242.7,
    "blackwell.attention": 0.5686,
    "blackwell.portable_attention": 0.3978,
    "blackwell.gemm8": 0.5662,
    "blackwell.gemm4": 0.4091,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 18.52,
    "eager.launch_s": 3.348e-05,
    "eager.gemm": 1.006,
    "eager.dp_overlap": 0.7093,
    "eager.tp_overlap": 0.4616,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 18.73,
    "compiled.launch_s": 3.302e-05,
    "compiled.gemm": 0.9796,
    "compiled.dp_overlap": 0.6297,
    "compiled.tp_overlap": 0.3874,
    "compiled.cast_bytes": 14.89,
    "compiled.gemm8": 1.144,
    "compiled.contention": 1.21,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 16.72,
    "megatron-core.launch_s": 3.801e-05,
    "megatron-core.gemm": 0.9821,
    "megatron-core.dp_overlap": 0.8811,
    "megatron-core.tp_overlap": 0.5904,
    "megatron-core.pp_overlap": 0.4651,
    "megatron-core.cast_bytes": 7.354,
    "megatron-core.gemm8": 0.9826,
    "megatron-core.kept_logit": 5.948,
    "megatron-core.constant_bytes": 1.137e08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 16.19,
    "megatron-2020.gemm": 1.018,
    "megatron-2020.score_bytes": 7.622,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.6213,
    "blackwell-ultra.gemm8": 0.5874,
    "blackwell-ultra.gemm4": 0.4109,
    "blackwell-ultra.attention": 0.5769,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.9333,
    "nanotron.hidden_bytes": 18.59,
    "nanotron.launch_s": 3.54e-05,
    "nanotron.tp_overlap": 0.4783,
    "nanotron.dp_overlap": 0.7143,
    "nanotron.launch_sync": 0.09443,
    "nanotron.list_s": 0.000298,
    "nanotron.stalled_s": 0.3898,
    "nanotron.launch_backward": 1.816,
    "nanotron.gather_overlap": 0.5256,
    "nanotron.logit_bytes": 24.08,
    "nanotron.kept_hidden": 11.16,
    "nanotron.kept_qkv": 1.111,
    "nanotron.kept_ffn": 1.347,
    "nanotron.kept_logit": 9.139,
    "nanotron.idle_bytes": 1.874,
    "nanotron.fragments": 0.06214,
    "nanotron.constant_bytes": 7.893e07,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.082,
    "llm-foundry.hidden_bytes": 18.53,
    "llm-foundry.launch_s": 3.348e-05,
    "llm-foundry.tp_overlap": 0.4616,
    "llm-foundry.dp_overlap": 0.7013,
    "llm-foundry.attention": 0.8162,
    "llm-foundry.contention": 1.329,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.043,
    "torchtitan-compiled.hidden_bytes": 18.45,
    "torchtitan-compiled.launch_s": 3.302e-05,
    "torchtitan-compiled.tp_overlap": 0.363,
    "torchtitan-compiled.dp_overlap": 0.5616,
    "torchtitan-compiled.cast_bytes": 19.9,
    "torchtitan-compiled.gemm8": 1.303,
    "torchtitan-compiled.contention": 1.892,
    "torchtitan-compiled.kept_hidden": 13.55,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 1.025,
    "torchtitan-eager.launch_s": 3.348e-05,
    "torchtitan-eager.cast_bytes": 11.31,
    "torchtitan-eager.contention": 2.068,
    "torchtitan-eager.kept_hidden": 18.78,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.9482,
    "maxtext.hidden_bytes": 18.75,
    "maxtext.launch_s": 3.302e-05,
    "maxtext.tp_overlap": 0.3874,
    "maxtext.dp_overlap": 0.5439,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.9021,
    "pax.hidden_bytes": 19.13,
    "pax.launch_s": 3.302e-05,
    "pax.tp_overlap": 0.3874,
    "pax.dp_overlap": 0.7041,
    "pax.cast_bytes": 18.13,
    "pax.gemm8": 1.05,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 1,
    "nemo-24.11.hidden_bytes": 16.74,
    "nemo-24.11.launch_s": 3.498e-05,
    "nemo-24.11.tp_overlap": 0.6098,
    "nemo-24.11.dp_overlap": 0.8833,
    "nemo-24.11.token_bytes": 427,
    "nemo-24.11.imbalance": 0.07152,
    "nemo-24.11.expert_launches": 45.09,
    "nemo-24.11.ep_overlap": 0.5795,
    "nemo-24.11.cast_bytes": 7.128,
    "nemo-24.11.gemm8": 0.9772,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.039,
    "megatron-2021.hidden_bytes": 15.11,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 0.953,
    "megatron-bridge-25.09.hidden_bytes": 16.52,
    "megatron-bridge-25.09.launch_s": 4.151e-05,
    "megatron-bridge-25.09.tp_overlap": 0.647,
    "megatron-bridge-25.09.dp_overlap": 0.8778,
    "megatron-bridge-25.09.cast_bytes": 5.756,
    "megatron-bridge-25.09.gemm8": 0.9708,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.9099,
    "simumax-b200.hidden_bytes": 16.75,
    "simumax-b200.launch_s": 5.225e-05,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 0.9493,
    "nemo-24.03.hidden_bytes": 17.04,
    "nemo-24.03.attention": 0.6369,
    # megatron-2022: vtrain
    "megatron-2022.gemm": 1.083,
    "megatron-2022.hidden_bytes": 14.18,
    "megatron-2022.launch_s": 2.936e-05,
    "megatron-2022.launch_sync": 0.1285,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.8823,
    "megatron-deepspeed-2022.hidden_bytes": 15.92,
    "megatron-deepspeed-2022.kept_bytes": 6.937,
    "megatron-deepspeed-2022.whole_bytes": 22.77,
    "megatron-deepspeed-2022.kept_hidden": 10.74,
    "megatron-deepspeed-2022.context_bytes": 3.544e09,
    "megatron-deepspeed-2022.kept_logit": 6.532,
    "megatron-deepspeed-2022.fragments": 0.06237,
    # nemo-25.04: NeMo 25.04 of nvidia-dgxc-benchmarking
    "nemo-25.04.gemm": 1.042,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 0.9815,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.029,
    "megatron-bridge-26.04.token_bytes": 34.81,
    "megatron-bridge-26.04.imbalance": 0.07968,
    "megatron-bridge-26.04.expert_launches": 48.2,
    "megatron-bridge-26.04.ep_overlap": 0.6262,
    # nemo-25.05: NeMo 25.05 of nvidia-dgxc-benchmarking
    "nemo-25.05.token_bytes": 132.6,
    "nemo-25.05.imbalance": 0.06333,
    "nemo-25.05.expert_launches": 39.35,
    "nemo-25.05.ep_overlap": 0.621,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.021,
    "megatron-bridge-26.06.token_bytes": 12.25,
    "megatron-bridge-26.06.imbalance": 0.07795,
    "megatron-bridge-26.06.expert_launches": 46.83,
    "megatron-bridge-26.06.ep_overlap": 0.667,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 7.333,
    "megatron-bridge-26.06.01.imbalance": 0.07727,
    "megatron-bridge-26.06.01.expert_launches": 37.52,
    "megatron-bridge-26.06.01.ep_overlap": 0.679,
    # megatron-core-unfused: Megatron's own tests
    "megatron-core-unfused.kept_score": 4.969,
    # megatron-deepspeed-2022-bf16: bigscience-bloom in bf16
    "megatron-deepspeed-2022-bf16.kept_bytes": 9.706,
}


def resolve(defaults: Mapping[str, float], chain: Sequence[str], constants: Mapping[str, float]) -> dict[str, float]:
    """Return each field's constant: that of the first owner in `chain` that has one, else the default."""
    result = dict(defaults)
    for field in defaults:
        for owner in chain:
            if f"{owner}.{field}" in constants:
                result[field] = constants[f"{owner}.{field}"]
                break
    return result
