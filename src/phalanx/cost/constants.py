"""What was measured of stacks and chips: fitted on the published runs that ship with Phalanx.

Written by `python -m benchmarks calibrate --write`; what each field means stands with its class (Profile,
Generation), from whose defaults the fit starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CONSTANTS: dict[str, float] = {
    # links: nccl-tests of collectives.csv
    "nvidia.node_hop_s": 1.239e-06,
    "nvidia.node_bulk_s": 5.76e-06,
    "nvidia.net_hop_s": 5.01e-06,
    "nvidia.net_bulk_s": 7.387e-06,
    "nvidia.cloud_hop_s": 6.251e-05,
    "nvidia.cloud_bulk_s": 0.0004187,
    "nvidia.bulk_bytes": 3.015e+05,
    "nvidia.bulk_reduce_bytes": 8.488e+05,
    "nvidia.nic": 0.8755,
    "nvidia.nvlink": 0.7221,
    "ampere.nvlink": 0.629,
    "hopper.reduce_gain": 1.472,
    "blackwell.nvlink": 0.7426,
    "blackwell.reduce_gain": 1.264,
    # nvidia: all families on NVIDIA's chips
    "nvidia.gemm": 0.7864,
    "nvidia.gemm_half": 458.1,
    "nvidia.attention": 0.4982,
    "nvidia.attention_half": 430.7,
    "nvidia.memory": 0.7976,
    "nvidia.portable_attention": 0.4217,
    "nvidia.attention_backward": 0.7327,
    "nvidia.attention_narrow": 0.185,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.829,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9268,
    # any: all families
    "any.hidden_bytes": 16.55,
    "any.ffn_bytes": 6.549,
    "any.backward_traffic": 1.518,
    "any.logit_bytes": 19.59,
    "any.launch_s": 3.675e-05,
    "any.launch_backward": 1.748,
    "any.launch_sync": 0.0742,
    "any.tp_overlap": 0.3204,
    "any.dp_overlap": 0.8578,
    "any.gather_overlap": 0.6184,
    "any.contention": 1,
    "any.optimizer_bytes": 30.93,
    "any.step_s": 0.01108,
    "any.cast_bytes": 10.65,
    "any.fine_cast": 2.155,
    "any.token_bytes": 21.18,
    "any.grouped": 1.024,
    "any.router_s": 0.001709,
    "any.ep_overlap": 0.6353,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.7452,
    "ampere.gemm_half": 630.1,
    "ampere.attention": 0.4965,
    "ampere.portable_attention": 0.5242,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.7029,
    "hopper.gemm_half": 666.5,
    "hopper.attention": 0.4166,
    "hopper.portable_attention": 0.3271,
    "hopper.gemm8": 0.604,
    "hopper.portable_gemm": 0.8186,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.4581,
    "blackwell.gemm_half": 516.3,
    "blackwell.attention": 0.4811,
    "blackwell.portable_attention": 0.4217,
    "blackwell.gemm8": 0.563,
    "blackwell.gemm4": 0.4482,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 14.83,
    "eager.launch_s": 3.674e-05,
    "eager.gemm": 0.9981,
    "eager.dp_overlap": 0.8804,
    "eager.tp_overlap": 0.4241,
    "eager.contention": 1.689,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 16.57,
    "compiled.launch_s": 3.679e-05,
    "compiled.gemm": 0.9903,
    "compiled.dp_overlap": 0.8721,
    "compiled.tp_overlap": 0.2736,
    "compiled.cast_bytes": 14.55,
    "compiled.gemm8": 1.186,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 15.58,
    "megatron-core.launch_s": 4.385e-05,
    "megatron-core.gemm": 1.011,
    "megatron-core.dp_overlap": 0.9327,
    "megatron-core.tp_overlap": 0.339,
    "megatron-core.cast_bytes": 8.482,
    "megatron-core.gemm8": 1.059,
    "megatron-core.kept_logit": 5.96,
    "megatron-core.constant_bytes": 1.134e+08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 12.76,
    "megatron-2020.launch_s": 3.581e-05,
    "megatron-2020.gemm": 1.037,
    "megatron-2020.score_bytes": 9.992e-10,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.4548,
    "blackwell-ultra.gemm8": 0.6066,
    "blackwell-ultra.gemm4": 0.456,
    "blackwell-ultra.attention": 0.4973,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.9298,
    "nanotron.hidden_bytes": 15.24,
    "nanotron.launch_s": 3.69e-05,
    "nanotron.tp_overlap": 0.4889,
    "nanotron.dp_overlap": 0.8936,
    "nanotron.launch_sync": 0.1008,
    "nanotron.list_s": 0.0003028,
    "nanotron.launch_backward": 1.711,
    "nanotron.gather_overlap": 0.6383,
    "nanotron.logit_bytes": 26.6,
    "nanotron.kept_whole": 3.129,
    "nanotron.kept_behind": 0.6208,
    "nanotron.kept_hidden": 11.89,
    "nanotron.kept_qkv": 1.148,
    "nanotron.kept_ffn": 1.38,
    "nanotron.kept_logit": 8.885,
    "nanotron.idle_bytes": 2.01,
    "nanotron.fragments": 0.06088,
    "nanotron.constant_bytes": 1.11e+08,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.125,
    "llm-foundry.hidden_bytes": 14.5,
    "llm-foundry.launch_s": 3.683e-05,
    "llm-foundry.tp_overlap": 0.4264,
    "llm-foundry.dp_overlap": 0.8882,
    "llm-foundry.attention": 0.7733,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.07,
    "torchtitan-compiled.hidden_bytes": 16.37,
    "torchtitan-compiled.launch_s": 3.715e-05,
    "torchtitan-compiled.tp_overlap": 0.2519,
    "torchtitan-compiled.dp_overlap": 0.8661,
    "torchtitan-compiled.cast_bytes": 18.1,
    "torchtitan-compiled.gemm8": 1.321,
    "torchtitan-compiled.contention": 1.586,
    "torchtitan-compiled.kept_hidden": 3.678,
    "torchtitan-compiled.kept_qkv": 0.4164,
    "torchtitan-compiled.kept_ffn": 0.4179,
    "torchtitan-compiled.kept_logit": 13.31,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 0.9455,
    "torchtitan-eager.hidden_bytes": 15.07,
    "torchtitan-eager.launch_s": 3.673e-05,
    "torchtitan-eager.cast_bytes": 14.29,
    "torchtitan-eager.kept_hidden": 4.51,
    "torchtitan-eager.kept_ffn": 0.7016,
    "torchtitan-eager.kept_logit": 6.068,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.9759,
    "maxtext.hidden_bytes": 16.23,
    "maxtext.launch_s": 3.553e-05,
    "maxtext.tp_overlap": 0.2945,
    "maxtext.dp_overlap": 0.8289,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.9056,
    "pax.hidden_bytes": 17.12,
    "pax.launch_s": 3.792e-05,
    "pax.tp_overlap": 0.2505,
    "pax.dp_overlap": 0.9159,
    "pax.cast_bytes": 19.33,
    "pax.gemm8": 1.06,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.9617,
    "simumax-b200.hidden_bytes": 15.58,
    "simumax-b200.launch_s": 5.787e-05,
    "simumax-b200.tp_overlap": 0.2663,
    "simumax-b200.dp_overlap": 0.9315,
    "simumax-b200.kept_logit": 9.823,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 1.101,
    "nemo-24.11.hidden_bytes": 15.49,
    "nemo-24.11.launch_s": 4.385e-05,
    "nemo-24.11.tp_overlap": 0.3918,
    "nemo-24.11.dp_overlap": 0.9356,
    "nemo-24.11.token_bytes": 21.4,
    "nemo-24.11.router_s": 0.001917,
    "nemo-24.11.ep_overlap": 0.6735,
    "nemo-24.11.cast_bytes": 7.848,
    "nemo-24.11.gemm8": 1.046,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.069,
    "megatron-2021.hidden_bytes": 12.37,
    "megatron-2021.launch_s": 3.244e-05,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 1.022,
    "megatron-bridge-25.09.hidden_bytes": 15.5,
    "megatron-bridge-25.09.launch_s": 6.679e-05,
    "megatron-bridge-25.09.tp_overlap": 0.3872,
    "megatron-bridge-25.09.dp_overlap": 0.9323,
    "megatron-bridge-25.09.cast_bytes": 7.307,
    "megatron-bridge-25.09.gemm8": 1.135,
    "megatron-bridge-25.09.contention": 1.177,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 0.9734,
    "nemo-24.03.hidden_bytes": 16.15,
    "nemo-24.03.launch_s": 4.385e-05,
    # megatron-2022: vtrain
    "megatron-2022.gemm": 1.089,
    "megatron-2022.hidden_bytes": 12.14,
    "megatron-2022.launch_s": 2.93e-05,
    "megatron-2022.launch_sync": 0.1249,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.9158,
    "megatron-deepspeed-2022.hidden_bytes": 12.76,
    "megatron-deepspeed-2022.launch_s": 3.244e-05,
    "megatron-deepspeed-2022.kept_bytes": 7.004,
    "megatron-deepspeed-2022.whole_bytes": 22.67,
    "megatron-deepspeed-2022.kept_hidden": 10.04,
    "megatron-deepspeed-2022.context_bytes": 3.315e+09,
    "megatron-deepspeed-2022.kept_logit": 3.846,
    "megatron-deepspeed-2022.fragments": 0.06047,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 1.042,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.077,
    "megatron-bridge-26.04.token_bytes": 21.94,
    "megatron-bridge-26.04.router_s": 0.001504,
    "megatron-bridge-26.04.ep_overlap": 0.7302,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.074,
    "megatron-bridge-26.06.token_bytes": 16.16,
    "megatron-bridge-26.06.router_s": 0.0009317,
    "megatron-bridge-26.06.ep_overlap": 0.7416,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 12.59,
    "megatron-bridge-26.06.01.router_s": 0.000608,
    "megatron-bridge-26.06.01.ep_overlap": 0.7878,
    # megatron-core-unfused: Megatron's own tests
    "megatron-core-unfused.kept_score": 4.964,
    # megatron-deepspeed-2022-bf16: megatron-deepspeed-2022-bf16
    "megatron-deepspeed-2022-bf16.kept_bytes": 9.773,
}


def resolve(defaults: Mapping[str, float], chain: Sequence[str], constants: Mapping[str, float]) -> dict[str, float]:
    """Each field's constant: of the first in a chain of owners that has one, else the default."""
    found = dict(defaults)
    for field in defaults:
        for owner in chain:
            if f"{owner}.{field}" in constants:
                found[field] = constants[f"{owner}.{field}"]
                break
    return found
