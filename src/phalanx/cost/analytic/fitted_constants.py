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
    "nvidia.bulk_bytes": 3.051e+05,
    "nvidia.bulk_reduce_bytes": 8.621e+05,
    "nvidia.nic": 0.9009,
    "nvidia.nvlink": 0.7221,
    "ampere.nvlink": 0.7676,
    "ampere.start_s": 5e-05,
    "hopper.reduce_gain": 1.472,
    "blackwell.nvlink": 0.7426,
    "blackwell.reduce_gain": 1.264,
    # nvidia: all families on NVIDIA's chips
    "nvidia.gemm": 0.8045,
    "nvidia.gemm8": 0.59,
    "nvidia.gemm_half": 245.9,
    "nvidia.misaligned": 0.1218,
    "nvidia.attention": 0.5921,
    "nvidia.attention_half": 489.3,
    "nvidia.memory": 0.7996,
    "nvidia.portable_attention": 0.3982,
    "nvidia.attention_backward": 0.8324,
    "nvidia.portable_backward": 0.7611,
    "nvidia.attention_narrow": 0.1961,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.9325,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9427,
    # GB300: nemo-megatron-bridge, against B300
    "GB300.clock": 1.08,
    # any: all families
    "any.hidden_bytes": 18.04,
    "any.ffn_bytes": 6.595,
    "any.backward_traffic": 1.546,
    "any.logit_bytes": 21.27,
    "any.launch_s": 3.358e-05,
    "any.launch_backward": 1.748,
    "any.launch_sync": 0.07884,
    "any.tp_overlap": 0.4277,
    "any.dp_overlap": 0.753,
    "any.gather_overlap": 0.5671,
    "any.ring_bytes": 21.52,
    "any.optimizer_bytes": 28.51,
    "any.step_s": 0.01029,
    "any.cast_bytes": 9.691,
    "any.fine_cast": 2.109,
    "any.token_bytes": 53.68,
    "any.grouped": 1.081,
    "any.router_s": 9.844e-05,
    "any.imbalance": 0.0813,
    "any.expert_launches": 53.99,
    "any.ep_overlap": 0.5805,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.7233,
    "ampere.gemm_half": 265.3,
    "ampere.attention": 0.5921,
    "ampere.portable_attention": 0.488,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.6968,
    "hopper.gemm_half": 278.4,
    "hopper.attention": 0.6007,
    "hopper.portable_attention": 0.2852,
    "hopper.gemm8": 0.6181,
    "hopper.portable_gemm": 0.8183,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.6024,
    "blackwell.gemm_half": 261.8,
    "blackwell.attention": 0.5754,
    "blackwell.portable_attention": 0.3982,
    "blackwell.gemm8": 0.5431,
    "blackwell.gemm4": 0.3954,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 18.06,
    "eager.launch_s": 3.391e-05,
    "eager.gemm": 1.006,
    "eager.dp_overlap": 0.7291,
    "eager.tp_overlap": 0.4582,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 18.52,
    "compiled.launch_s": 3.358e-05,
    "compiled.gemm": 0.9802,
    "compiled.dp_overlap": 0.6377,
    "compiled.tp_overlap": 0.3845,
    "compiled.cast_bytes": 14.96,
    "compiled.gemm8": 1.13,
    "compiled.contention": 1.216,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 16.41,
    "megatron-core.launch_s": 3.845e-05,
    "megatron-core.gemm": 0.9813,
    "megatron-core.dp_overlap": 0.8866,
    "megatron-core.tp_overlap": 0.5795,
    "megatron-core.pp_overlap": 0.5208,
    "megatron-core.cast_bytes": 7.273,
    "megatron-core.gemm8": 0.9845,
    "megatron-core.kept_logit": 5.948,
    "megatron-core.constant_bytes": 1.137e+08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 16.07,
    "megatron-2020.launch_s": 3.307e-05,
    "megatron-2020.gemm": 1.019,
    "megatron-2020.score_bytes": 7.417,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.6003,
    "blackwell-ultra.gemm8": 0.5696,
    "blackwell-ultra.gemm4": 0.3962,
    "blackwell-ultra.attention": 0.5886,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.9285,
    "nanotron.hidden_bytes": 18.12,
    "nanotron.launch_s": 3.526e-05,
    "nanotron.tp_overlap": 0.4755,
    "nanotron.dp_overlap": 0.7404,
    "nanotron.launch_sync": 0.0977,
    "nanotron.list_s": 0.0002981,
    "nanotron.stalled_s": 0.3895,
    "nanotron.launch_backward": 1.811,
    "nanotron.gather_overlap": 0.514,
    "nanotron.logit_bytes": 28.79,
    "nanotron.kept_hidden": 11.21,
    "nanotron.kept_qkv": 1.106,
    "nanotron.kept_ffn": 1.347,
    "nanotron.kept_logit": 9.139,
    "nanotron.idle_bytes": 1.874,
    "nanotron.fragments": 0.06214,
    "nanotron.constant_bytes": 7.889e+07,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.084,
    "llm-foundry.hidden_bytes": 18.02,
    "llm-foundry.launch_s": 3.391e-05,
    "llm-foundry.tp_overlap": 0.4582,
    "llm-foundry.dp_overlap": 0.7208,
    "llm-foundry.attention": 0.8131,
    "llm-foundry.contention": 1.338,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.043,
    "torchtitan-compiled.hidden_bytes": 18.25,
    "torchtitan-compiled.launch_s": 3.358e-05,
    "torchtitan-compiled.tp_overlap": 0.361,
    "torchtitan-compiled.dp_overlap": 0.5707,
    "torchtitan-compiled.cast_bytes": 19.91,
    "torchtitan-compiled.gemm8": 1.283,
    "torchtitan-compiled.contention": 1.9,
    "torchtitan-compiled.kept_hidden": 13.55,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 1.026,
    "torchtitan-eager.launch_s": 3.391e-05,
    "torchtitan-eager.cast_bytes": 11.37,
    "torchtitan-eager.contention": 2.085,
    "torchtitan-eager.kept_hidden": 18.78,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.9486,
    "maxtext.hidden_bytes": 18.54,
    "maxtext.launch_s": 3.358e-05,
    "maxtext.tp_overlap": 0.3845,
    "maxtext.dp_overlap": 0.5504,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.9042,
    "pax.hidden_bytes": 18.9,
    "pax.launch_s": 3.358e-05,
    "pax.tp_overlap": 0.3845,
    "pax.dp_overlap": 0.7109,
    "pax.cast_bytes": 18.27,
    "pax.gemm8": 1.037,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 0.9985,
    "nemo-24.11.hidden_bytes": 16.4,
    "nemo-24.11.launch_s": 3.651e-05,
    "nemo-24.11.tp_overlap": 0.5997,
    "nemo-24.11.dp_overlap": 0.889,
    "nemo-24.11.token_bytes": 445.9,
    "nemo-24.11.imbalance": 0.07136,
    "nemo-24.11.expert_launches": 51.86,
    "nemo-24.11.ep_overlap": 0.619,
    "nemo-24.11.cast_bytes": 7.024,
    "nemo-24.11.gemm8": 0.9613,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.041,
    "megatron-2021.hidden_bytes": 15.03,
    "megatron-2021.launch_s": 3.108e-05,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 0.95,
    "megatron-bridge-25.09.hidden_bytes": 16.21,
    "megatron-bridge-25.09.launch_s": 4.375e-05,
    "megatron-bridge-25.09.tp_overlap": 0.6309,
    "megatron-bridge-25.09.dp_overlap": 0.8847,
    "megatron-bridge-25.09.cast_bytes": 5.652,
    "megatron-bridge-25.09.gemm8": 0.9925,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.9099,
    "simumax-b200.hidden_bytes": 16.44,
    "simumax-b200.launch_s": 5.209e-05,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 0.9527,
    "nemo-24.03.hidden_bytes": 16.66,
    "nemo-24.03.launch_s": 3.651e-05,
    "nemo-24.03.attention": 0.638,
    # megatron-2022: vtrain
    "megatron-2022.gemm": 1.085,
    "megatron-2022.hidden_bytes": 14.11,
    "megatron-2022.launch_s": 2.921e-05,
    "megatron-2022.launch_sync": 0.1339,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.8841,
    "megatron-deepspeed-2022.hidden_bytes": 15.83,
    "megatron-deepspeed-2022.launch_s": 3.108e-05,
    "megatron-deepspeed-2022.kept_bytes": 6.937,
    "megatron-deepspeed-2022.whole_bytes": 22.77,
    "megatron-deepspeed-2022.kept_hidden": 10.74,
    "megatron-deepspeed-2022.context_bytes": 3.544e+09,
    "megatron-deepspeed-2022.kept_logit": 6.532,
    "megatron-deepspeed-2022.fragments": 0.06237,
    # nemo-25.04: NeMo 25.04 of nvidia-dgxc-benchmarking
    "nemo-25.04.gemm": 1.042,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 0.9747,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.021,
    "megatron-bridge-26.04.token_bytes": 53.53,
    "megatron-bridge-26.04.imbalance": 0.08345,
    "megatron-bridge-26.04.expert_launches": 43.34,
    "megatron-bridge-26.04.ep_overlap": 0.7229,
    # nemo-25.05: NeMo 25.05 of nvidia-dgxc-benchmarking
    "nemo-25.05.token_bytes": 138.5,
    "nemo-25.05.imbalance": 0.06236,
    "nemo-25.05.expert_launches": 40.81,
    "nemo-25.05.ep_overlap": 0.6596,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.005,
    "megatron-bridge-26.06.token_bytes": 20.96,
    "megatron-bridge-26.06.imbalance": 0.08523,
    "megatron-bridge-26.06.expert_launches": 36.9,
    "megatron-bridge-26.06.ep_overlap": 0.7231,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 14.77,
    "megatron-bridge-26.06.01.imbalance": 0.08763,
    "megatron-bridge-26.06.01.expert_launches": 28.24,
    "megatron-bridge-26.06.01.ep_overlap": 0.7159,
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
