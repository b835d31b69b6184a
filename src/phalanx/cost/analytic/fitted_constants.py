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
    "nvidia.gemm": 0.7878,
    "nvidia.gemm8": 0.6,
    "nvidia.gemm_half": 277.2,
    "nvidia.misaligned": 0.1339,
    "nvidia.attention": 0.6,
    "nvidia.attention_half": 414.6,
    "nvidia.memory": 0.8027,
    "nvidia.portable_attention": 0.4553,
    "nvidia.attention_backward": 0.8261,
    "nvidia.portable_backward": 0.7821,
    "nvidia.attention_narrow": 0.1901,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.8921,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9476,
    # GB300: nemo-megatron-bridge, against B300
    "GB300.clock": 1.084,
    # any: all families
    "any.hidden_bytes": 16.96,
    "any.ffn_bytes": 6.607,
    "any.backward_traffic": 1.533,
    "any.logit_bytes": 18.8,
    "any.launch_s": 3.23e-05,
    "any.launch_backward": 1.679,
    "any.launch_sync": 0.0774,
    "any.tp_overlap": 0.4306,
    "any.dp_overlap": 0.7238,
    "any.gather_overlap": 0.5998,
    "any.ring_bytes": 19.79,
    "any.optimizer_bytes": 29.71,
    "any.step_s": 0.01048,
    "any.cast_bytes": 8.984,
    "any.fine_cast": 2.232,
    "any.token_bytes": 54.67,
    "any.grouped": 1.109,
    "any.router_s": 0.0001006,
    "any.imbalance": 0.08665,
    "any.expert_launches": 63.98,
    "any.ep_overlap": 0.6146,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.704,
    "ampere.gemm_half": 350.7,
    "ampere.attention": 0.6,
    "ampere.portable_attention": 0.5111,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.6973,
    "hopper.gemm_half": 503,
    "hopper.attention": 0.5996,
    "hopper.portable_attention": 0.3045,
    "hopper.gemm8": 0.6132,
    "hopper.portable_gemm": 0.7842,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.6013,
    "blackwell.gemm_half": 486.4,
    "blackwell.attention": 0.5726,
    "blackwell.portable_attention": 0.4091,
    "blackwell.gemm8": 0.542,
    "blackwell.gemm4": 0.3953,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 15.14,
    "eager.launch_s": 3.23e-05,
    "eager.gemm": 0.9969,
    "eager.dp_overlap": 0.572,
    "eager.tp_overlap": 0.4201,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 16.55,
    "compiled.launch_s": 3.274e-05,
    "compiled.gemm": 0.9872,
    "compiled.dp_overlap": 0.4549,
    "compiled.tp_overlap": 0.3706,
    "compiled.cast_bytes": 13.8,
    "compiled.gemm8": 1.102,
    "compiled.contention": 1.063,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 15.43,
    "megatron-core.launch_s": 3.54e-05,
    "megatron-core.gemm": 0.977,
    "megatron-core.dp_overlap": 0.8883,
    "megatron-core.tp_overlap": 0.5691,
    "megatron-core.pp_overlap": 0.5188,
    "megatron-core.cast_bytes": 6.456,
    "megatron-core.gemm8": 0.9693,
    "megatron-core.kept_logit": 5.941,
    "megatron-core.constant_bytes": 1.143e08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 15.09,
    "megatron-2020.launch_s": 3.204e-05,
    "megatron-2020.gemm": 1.048,
    "megatron-2020.score_bytes": 5.341,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.5994,
    "blackwell-ultra.gemm8": 0.5679,
    "blackwell-ultra.gemm4": 0.3961,
    "blackwell-ultra.attention": 0.588,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.9528,
    "nanotron.hidden_bytes": 15.08,
    "nanotron.launch_s": 3.558e-05,
    "nanotron.tp_overlap": 0.4633,
    "nanotron.dp_overlap": 0.6336,
    "nanotron.launch_sync": 0.09579,
    "nanotron.list_s": 0.0003011,
    "nanotron.stalled_s": 0.3883,
    "nanotron.launch_backward": 1.797,
    "nanotron.gather_overlap": 0.5799,
    "nanotron.logit_bytes": 23.86,
    "nanotron.kept_hidden": 11.39,
    "nanotron.kept_qkv": 1.108,
    "nanotron.kept_ffn": 1.339,
    "nanotron.kept_logit": 9.129,
    "nanotron.idle_bytes": 1.892,
    "nanotron.fragments": 0.06202,
    "nanotron.constant_bytes": 7.967e07,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.09,
    "llm-foundry.hidden_bytes": 14.98,
    "llm-foundry.launch_s": 3.23e-05,
    "llm-foundry.tp_overlap": 0.4201,
    "llm-foundry.dp_overlap": 0.5091,
    "llm-foundry.attention": 0.7744,
    "llm-foundry.contention": 1.063,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.065,
    "torchtitan-compiled.hidden_bytes": 16.32,
    "torchtitan-compiled.launch_s": 3.274e-05,
    "torchtitan-compiled.tp_overlap": 0.3542,
    "torchtitan-compiled.dp_overlap": 0.3592,
    "torchtitan-compiled.cast_bytes": 18.64,
    "torchtitan-compiled.gemm8": 1.245,
    "torchtitan-compiled.contention": 1.657,
    "torchtitan-compiled.kept_hidden": 13.55,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 1.068,
    "torchtitan-eager.launch_s": 3.23e-05,
    "torchtitan-eager.cast_bytes": 10.07,
    "torchtitan-eager.contention": 1.928,
    "torchtitan-eager.kept_hidden": 18.78,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.9777,
    "maxtext.hidden_bytes": 16.5,
    "maxtext.launch_s": 3.274e-05,
    "maxtext.tp_overlap": 0.3706,
    "maxtext.dp_overlap": 0.3886,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.9216,
    "pax.hidden_bytes": 16.8,
    "pax.launch_s": 3.274e-05,
    "pax.tp_overlap": 0.3706,
    "pax.dp_overlap": 0.5351,
    "pax.cast_bytes": 16.54,
    "pax.gemm8": 0.9958,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 1.024,
    "nemo-24.11.hidden_bytes": 15.34,
    "nemo-24.11.launch_s": 3.54e-05,
    "nemo-24.11.tp_overlap": 0.577,
    "nemo-24.11.dp_overlap": 0.889,
    "nemo-24.11.token_bytes": 441.8,
    "nemo-24.11.imbalance": 0.0802,
    "nemo-24.11.expert_launches": 63.98,
    "nemo-24.11.ep_overlap": 0.6058,
    "nemo-24.11.cast_bytes": 6.309,
    "nemo-24.11.gemm8": 0.9574,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.073,
    "megatron-2021.hidden_bytes": 14.97,
    "megatron-2021.launch_s": 3.204e-05,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 0.9552,
    "megatron-bridge-25.09.hidden_bytes": 15.21,
    "megatron-bridge-25.09.launch_s": 4.514e-05,
    "megatron-bridge-25.09.tp_overlap": 0.6195,
    "megatron-bridge-25.09.dp_overlap": 0.8866,
    "megatron-bridge-25.09.cast_bytes": 5.017,
    "megatron-bridge-25.09.gemm8": 0.9892,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.9067,
    "simumax-b200.hidden_bytes": 15.47,
    "simumax-b200.launch_s": 5.848e-05,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 0.9763,
    "nemo-24.03.hidden_bytes": 16.18,
    "nemo-24.03.launch_s": 3.54e-05,
    "nemo-24.03.attention": 0.6427,
    # megatron-2022: vtrain
    "megatron-2022.gemm": 1.099,
    "megatron-2022.hidden_bytes": 13.85,
    "megatron-2022.launch_s": 3.006e-05,
    "megatron-2022.launch_sync": 0.1224,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.9147,
    "megatron-deepspeed-2022.hidden_bytes": 15.74,
    "megatron-deepspeed-2022.launch_s": 3.204e-05,
    "megatron-deepspeed-2022.kept_bytes": 6.937,
    "megatron-deepspeed-2022.whole_bytes": 22.79,
    "megatron-deepspeed-2022.kept_hidden": 10.62,
    "megatron-deepspeed-2022.context_bytes": 3.544e09,
    "megatron-deepspeed-2022.kept_logit": 6.532,
    "megatron-deepspeed-2022.fragments": 0.06296,
    # nemo-25.04: NeMo 25.04 of nvidia-dgxc-benchmarking
    "nemo-25.04.gemm": 1.076,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 0.974,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.026,
    "megatron-bridge-26.04.token_bytes": 55.85,
    "megatron-bridge-26.04.imbalance": 0.08719,
    "megatron-bridge-26.04.expert_launches": 46.86,
    "megatron-bridge-26.04.ep_overlap": 0.7502,
    # nemo-25.05: NeMo 25.05 of nvidia-dgxc-benchmarking
    "nemo-25.05.token_bytes": 175.9,
    "nemo-25.05.imbalance": 0.07203,
    "nemo-25.05.expert_launches": 63.98,
    "nemo-25.05.ep_overlap": 0.6526,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.015,
    "megatron-bridge-26.06.token_bytes": 25.49,
    "megatron-bridge-26.06.imbalance": 0.08711,
    "megatron-bridge-26.06.expert_launches": 45.74,
    "megatron-bridge-26.06.ep_overlap": 0.7656,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 22.45,
    "megatron-bridge-26.06.01.imbalance": 0.09257,
    "megatron-bridge-26.06.01.expert_launches": 35.94,
    "megatron-bridge-26.06.01.ep_overlap": 0.7479,
    # megatron-core-unfused: Megatron's own tests
    "megatron-core-unfused.kept_score": 4.972,
    # megatron-deepspeed-2022-bf16: bigscience-bloom in bf16
    "megatron-deepspeed-2022-bf16.kept_bytes": 9.707,
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
