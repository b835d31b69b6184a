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
    "nvidia.gemm": 0.8047,
    "nvidia.gemm8": 0.5901,
    "nvidia.gemm_half": 245.9,
    "nvidia.misaligned": 0.1218,
    "nvidia.odd": 0.3879,
    "nvidia.attention": 0.5925,
    "nvidia.attention_half": 488.1,
    "nvidia.memory": 0.7996,
    "nvidia.portable_attention": 0.3981,
    "nvidia.attention_backward": 0.8335,
    "nvidia.portable_backward": 0.7612,
    "nvidia.attention_narrow": 0.1961,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.9326,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9425,
    # GB300: nemo-megatron-bridge, against B300
    "GB300.clock": 1.081,
    # any: all families
    "any.hidden_bytes": 18.05,
    "any.ffn_bytes": 6.617,
    "any.backward_traffic": 1.547,
    "any.logit_bytes": 21.34,
    "any.launch_s": 3.289e-05,
    "any.launch_backward": 1.75,
    "any.launch_sync": 0.08326,
    "any.tp_overlap": 0.4257,
    "any.dp_overlap": 0.7535,
    "any.gather_overlap": 0.5676,
    "any.ring_bytes": 21.52,
    "any.optimizer_bytes": 28.56,
    "any.step_s": 0.01033,
    "any.cast_bytes": 9.704,
    "any.fine_cast": 2.106,
    "any.token_bytes": 40.97,
    "any.grouped": 1.061,
    "any.router_s": 9.612e-05,
    "any.expert_s": 5.269e-05,
    "any.imbalance": 0.07191,
    "any.expert_launches": 49.42,
    "any.ep_overlap": 0.5436,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.725,
    "ampere.gemm_half": 275.6,
    "ampere.attention": 0.5925,
    "ampere.portable_attention": 0.4882,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.6974,
    "hopper.gemm_half": 277.8,
    "hopper.attention": 0.6017,
    "hopper.portable_attention": 0.2851,
    "hopper.gemm8": 0.6183,
    "hopper.portable_gemm": 0.8178,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.6096,
    "blackwell.gemm_half": 262.3,
    "blackwell.attention": 0.5763,
    "blackwell.portable_attention": 0.3981,
    "blackwell.gemm8": 0.5426,
    "blackwell.gemm4": 0.3943,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 18.06,
    "eager.launch_s": 3.33e-05,
    "eager.gemm": 1.006,
    "eager.dp_overlap": 0.7293,
    "eager.tp_overlap": 0.4577,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 18.52,
    "compiled.launch_s": 3.289e-05,
    "compiled.gemm": 0.9801,
    "compiled.dp_overlap": 0.6386,
    "compiled.tp_overlap": 0.3764,
    "compiled.cast_bytes": 14.96,
    "compiled.gemm8": 1.13,
    "compiled.contention": 1.216,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 16.44,
    "megatron-core.launch_s": 3.792e-05,
    "megatron-core.gemm": 0.9813,
    "megatron-core.dp_overlap": 0.887,
    "megatron-core.tp_overlap": 0.5784,
    "megatron-core.pp_overlap": 0.5235,
    "megatron-core.cast_bytes": 7.289,
    "megatron-core.gemm8": 0.9834,
    "megatron-core.kept_logit": 5.948,
    "megatron-core.constant_bytes": 1.137e08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 15.74,
    "megatron-2020.gemm": 1.016,
    "megatron-2020.score_bytes": 7.136,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.6075,
    "blackwell-ultra.gemm8": 0.5692,
    "blackwell-ultra.gemm4": 0.3948,
    "blackwell-ultra.attention": 0.5901,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.9284,
    "nanotron.hidden_bytes": 18.11,
    "nanotron.launch_s": 3.494e-05,
    "nanotron.tp_overlap": 0.4759,
    "nanotron.dp_overlap": 0.7403,
    "nanotron.launch_sync": 0.1041,
    "nanotron.list_s": 0.0002982,
    "nanotron.stalled_s": 0.3895,
    "nanotron.launch_backward": 1.825,
    "nanotron.gather_overlap": 0.5145,
    "nanotron.logit_bytes": 28.92,
    "nanotron.kept_hidden": 11.07,
    "nanotron.kept_qkv": 1.129,
    "nanotron.kept_ffn": 1.344,
    "nanotron.kept_logit": 9.133,
    "nanotron.idle_bytes": 1.873,
    "nanotron.fragments": 0.06242,
    "nanotron.constant_bytes": 7.889e07,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.083,
    "llm-foundry.hidden_bytes": 18.01,
    "llm-foundry.launch_s": 3.33e-05,
    "llm-foundry.tp_overlap": 0.4577,
    "llm-foundry.dp_overlap": 0.7209,
    "llm-foundry.attention": 0.8134,
    "llm-foundry.contention": 1.338,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.043,
    "torchtitan-compiled.hidden_bytes": 18.24,
    "torchtitan-compiled.launch_s": 3.289e-05,
    "torchtitan-compiled.tp_overlap": 0.3496,
    "torchtitan-compiled.dp_overlap": 0.5715,
    "torchtitan-compiled.cast_bytes": 19.89,
    "torchtitan-compiled.gemm8": 1.283,
    "torchtitan-compiled.contention": 1.9,
    "torchtitan-compiled.kept_hidden": 13.55,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 1.025,
    "torchtitan-eager.launch_s": 3.33e-05,
    "torchtitan-eager.cast_bytes": 11.38,
    "torchtitan-eager.contention": 2.085,
    "torchtitan-eager.kept_hidden": 18.78,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.9482,
    "maxtext.hidden_bytes": 18.54,
    "maxtext.launch_s": 3.289e-05,
    "maxtext.tp_overlap": 0.3764,
    "maxtext.dp_overlap": 0.552,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.9041,
    "pax.hidden_bytes": 18.9,
    "pax.launch_s": 3.289e-05,
    "pax.tp_overlap": 0.3764,
    "pax.dp_overlap": 0.7114,
    "pax.cast_bytes": 18.27,
    "pax.gemm8": 1.038,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 0.9809,
    "nemo-24.11.hidden_bytes": 16.63,
    "nemo-24.11.launch_s": 3.895e-05,
    "nemo-24.11.tp_overlap": 0.4763,
    "nemo-24.11.dp_overlap": 0.8878,
    "nemo-24.11.token_bytes": 331.1,
    "nemo-24.11.imbalance": 0.07732,
    "nemo-24.11.expert_launches": 70.7,
    "nemo-24.11.ep_overlap": 0.5359,
    "nemo-24.11.cast_bytes": 6.892,
    "nemo-24.11.gemm8": 0.9792,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.038,
    "megatron-2021.hidden_bytes": 14.58,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 0.9706,
    "megatron-bridge-25.09.hidden_bytes": 16.45,
    "megatron-bridge-25.09.launch_s": 4.092e-05,
    "megatron-bridge-25.09.tp_overlap": 0.5524,
    "megatron-bridge-25.09.dp_overlap": 0.8825,
    "megatron-bridge-25.09.cast_bytes": 5.638,
    "megatron-bridge-25.09.gemm8": 0.9696,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.9098,
    "simumax-b200.hidden_bytes": 16.47,
    "simumax-b200.launch_s": 5.17e-05,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 0.9297,
    "nemo-24.03.hidden_bytes": 16.94,
    "nemo-24.03.attention": 0.6466,
    # megatron-2022: vtrain over several nodes
    "megatron-2022.gemm": 1.057,
    "megatron-2022.hidden_bytes": 13.6,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.8837,
    "megatron-deepspeed-2022.hidden_bytes": 15.33,
    "megatron-deepspeed-2022.kept_bytes": 6.937,
    "megatron-deepspeed-2022.whole_bytes": 22.77,
    "megatron-deepspeed-2022.kept_hidden": 10.74,
    "megatron-deepspeed-2022.context_bytes": 3.544e09,
    "megatron-deepspeed-2022.kept_logit": 6.532,
    "megatron-deepspeed-2022.fragments": 0.06237,
    # vtrain: vtrain in one node
    "vtrain.gemm": 1.013,
    "vtrain.hidden_bytes": 13.87,
    "vtrain.launch_s": 3.597e-05,
    "vtrain.launch_sync": 0.1168,
    "vtrain.join_s": 0.000302,
    # nemo-25.04: NeMo 25.04 of nvidia-dgxc-benchmarking
    "nemo-25.04.gemm": 1.033,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 0.9978,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.044,
    "megatron-bridge-26.04.token_bytes": 36.65,
    "megatron-bridge-26.04.imbalance": 0.07105,
    "megatron-bridge-26.04.expert_launches": 47.97,
    "megatron-bridge-26.04.ep_overlap": 0.6327,
    # nemo-25.05: NeMo 25.05 of nvidia-dgxc-benchmarking
    "nemo-25.05.token_bytes": 124,
    "nemo-25.05.imbalance": 0.05363,
    "nemo-25.05.expert_launches": 37.45,
    "nemo-25.05.ep_overlap": 0.6301,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.034,
    "megatron-bridge-26.06.token_bytes": 13.42,
    "megatron-bridge-26.06.imbalance": 0.06899,
    "megatron-bridge-26.06.expert_launches": 45.6,
    "megatron-bridge-26.06.ep_overlap": 0.6805,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 8.369,
    "megatron-bridge-26.06.01.imbalance": 0.06803,
    "megatron-bridge-26.06.01.expert_launches": 35.03,
    "megatron-bridge-26.06.01.ep_overlap": 0.6974,
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
