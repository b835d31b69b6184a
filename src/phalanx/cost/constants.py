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
    "nvidia.bulk_bytes": 3.015e05,
    "nvidia.bulk_reduce_bytes": 8.488e05,
    "nvidia.nic": 0.8755,
    "nvidia.nvlink": 0.7221,
    "ampere.nvlink": 0.629,
    "hopper.reduce_gain": 1.472,
    "blackwell.nvlink": 0.7426,
    "blackwell.reduce_gain": 1.264,
    # nvidia: all families on NVIDIA's chips
    "nvidia.gemm": 0.8139,
    "nvidia.gemm8": 0.5937,
    "nvidia.gemm_half": 469.2,
    "nvidia.attention": 0.4936,
    "nvidia.attention_half": 427.6,
    "nvidia.memory": 0.7983,
    "nvidia.portable_attention": 0.4185,
    "nvidia.attention_backward": 0.7373,
    "nvidia.attention_narrow": 0.1826,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.8739,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9323,
    # any: all families
    "any.hidden_bytes": 16.63,
    "any.ffn_bytes": 6.381,
    "any.backward_traffic": 1.516,
    "any.logit_bytes": 19.45,
    "any.launch_s": 3.313e-05,
    "any.launch_backward": 1.652,
    "any.launch_sync": 0.07747,
    "any.tp_overlap": 0.33,
    "any.dp_overlap": 0.625,
    "any.gather_overlap": 0.6292,
    "any.contention": 1.008,
    "any.optimizer_bytes": 30.07,
    "any.step_s": 0.01072,
    "any.cast_bytes": 8.867,
    "any.fine_cast": 2.102,
    "any.token_bytes": 12.87,
    "any.grouped": 1.035,
    "any.router_s": 0.002143,
    "any.ep_overlap": 0.6427,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.7642,
    "ampere.gemm_half": 640.1,
    "ampere.attention": 0.493,
    "ampere.portable_attention": 0.5245,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.7112,
    "hopper.gemm_half": 615.1,
    "hopper.attention": 0.4145,
    "hopper.portable_attention": 0.3161,
    "hopper.gemm8": 0.6308,
    "hopper.portable_gemm": 0.7947,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.6728,
    "blackwell.gemm_half": 545.1,
    "blackwell.attention": 0.4659,
    "blackwell.portable_attention": 0.4185,
    "blackwell.gemm8": 0.5439,
    "blackwell.gemm4": 0.4245,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 16.13,
    "eager.launch_s": 3.307e-05,
    "eager.gemm": 0.9911,
    "eager.dp_overlap": 0.4778,
    "eager.tp_overlap": 0.4135,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 17.35,
    "compiled.launch_s": 3.225e-05,
    "compiled.gemm": 0.9944,
    "compiled.dp_overlap": 0.415,
    "compiled.tp_overlap": 0.2905,
    "compiled.cast_bytes": 15.08,
    "compiled.gemm8": 1.16,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 15.39,
    "megatron-core.launch_s": 3.728e-05,
    "megatron-core.gemm": 1.018,
    "megatron-core.dp_overlap": 0.8731,
    "megatron-core.tp_overlap": 0.3617,
    "megatron-core.cast_bytes": 7.528,
    "megatron-core.gemm8": 1.033,
    "megatron-core.kept_logit": 5.941,
    "megatron-core.constant_bytes": 1.143e08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 13.66,
    "megatron-2020.launch_s": 3.278e-05,
    "megatron-2020.gemm": 1.017,
    "megatron-2020.score_bytes": 9.994e-10,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.6714,
    "blackwell-ultra.gemm8": 0.5806,
    "blackwell-ultra.gemm4": 0.4343,
    "blackwell-ultra.attention": 0.4833,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.6558,
    "simumax-b200.hidden_bytes": 15.37,
    "simumax-b200.launch_s": 5.968e-05,
    "simumax-b200.tp_overlap": 0.2864,
    "simumax-b200.dp_overlap": 0.8702,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.9376,
    "nanotron.hidden_bytes": 16.35,
    "nanotron.launch_s": 3.669e-05,
    "nanotron.tp_overlap": 0.4699,
    "nanotron.dp_overlap": 0.5393,
    "nanotron.launch_sync": 0.1042,
    "nanotron.list_s": 0.0003014,
    "nanotron.launch_backward": 1.717,
    "nanotron.gather_overlap": 0.6506,
    "nanotron.logit_bytes": 25.61,
    "nanotron.kept_hidden": 11.39,
    "nanotron.kept_qkv": 1.108,
    "nanotron.kept_ffn": 1.339,
    "nanotron.kept_logit": 9.129,
    "nanotron.idle_bytes": 1.892,
    "nanotron.fragments": 0.06202,
    "nanotron.constant_bytes": 7.967e07,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.051,
    "llm-foundry.hidden_bytes": 15.63,
    "llm-foundry.launch_s": 3.203e-05,
    "llm-foundry.tp_overlap": 0.4412,
    "llm-foundry.dp_overlap": 0.4193,
    "llm-foundry.attention": 0.7796,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.095,
    "torchtitan-compiled.hidden_bytes": 16.16,
    "torchtitan-compiled.launch_s": 3.063e-05,
    "torchtitan-compiled.tp_overlap": 0.2726,
    "torchtitan-compiled.dp_overlap": 0.3773,
    "torchtitan-compiled.cast_bytes": 20.01,
    "torchtitan-compiled.gemm8": 1.362,
    "torchtitan-compiled.contention": 1.77,
    "torchtitan-compiled.kept_hidden": 13.55,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 0.9349,
    "torchtitan-eager.hidden_bytes": 16.98,
    "torchtitan-eager.launch_s": 3.441e-05,
    "torchtitan-eager.cast_bytes": 10.02,
    "torchtitan-eager.contention": 1.877,
    "torchtitan-eager.kept_hidden": 18.78,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.9931,
    "maxtext.hidden_bytes": 17.33,
    "maxtext.launch_s": 3.22e-05,
    "maxtext.tp_overlap": 0.2798,
    "maxtext.dp_overlap": 0.2976,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.9201,
    "pax.hidden_bytes": 18.18,
    "pax.launch_s": 3.04e-05,
    "pax.tp_overlap": 0.2919,
    "pax.dp_overlap": 0.4389,
    "pax.cast_bytes": 20.6,
    "pax.gemm8": 1.046,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 1.077,
    "nemo-24.11.hidden_bytes": 15.33,
    "nemo-24.11.launch_s": 3.728e-05,
    "nemo-24.11.tp_overlap": 0.402,
    "nemo-24.11.dp_overlap": 0.882,
    "nemo-24.11.token_bytes": 12.95,
    "nemo-24.11.router_s": 0.00203,
    "nemo-24.11.ep_overlap": 0.683,
    "nemo-24.11.cast_bytes": 7.296,
    "nemo-24.11.gemm8": 1.009,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.047,
    "megatron-2021.hidden_bytes": 13.21,
    "megatron-2021.launch_s": 3.146e-05,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 1.011,
    "megatron-bridge-25.09.hidden_bytes": 15.32,
    "megatron-bridge-25.09.launch_s": 3.728e-05,
    "megatron-bridge-25.09.tp_overlap": 0.4063,
    "megatron-bridge-25.09.dp_overlap": 0.8752,
    "megatron-bridge-25.09.cast_bytes": 6.594,
    "megatron-bridge-25.09.gemm8": 1.092,
    "megatron-bridge-25.09.contention": 1.109,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 0.9488,
    "nemo-24.03.hidden_bytes": 15.98,
    "nemo-24.03.launch_s": 3.728e-05,
    # megatron-2022: vtrain
    "megatron-2022.gemm": 1.067,
    "megatron-2022.hidden_bytes": 12.94,
    "megatron-2022.launch_s": 3.009e-05,
    "megatron-2022.launch_sync": 0.129,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.8968,
    "megatron-deepspeed-2022.hidden_bytes": 13.66,
    "megatron-deepspeed-2022.launch_s": 3.145e-05,
    "megatron-deepspeed-2022.kept_bytes": 6.937,
    "megatron-deepspeed-2022.whole_bytes": 22.79,
    "megatron-deepspeed-2022.kept_hidden": 10.62,
    "megatron-deepspeed-2022.context_bytes": 3.544e09,
    "megatron-deepspeed-2022.kept_logit": 6.532,
    "megatron-deepspeed-2022.fragments": 0.06296,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 1.026,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.065,
    "megatron-bridge-26.04.token_bytes": 13.27,
    "megatron-bridge-26.04.router_s": 0.001912,
    "megatron-bridge-26.04.ep_overlap": 0.7562,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.056,
    "megatron-bridge-26.06.token_bytes": 10.95,
    "megatron-bridge-26.06.router_s": 0.001146,
    "megatron-bridge-26.06.ep_overlap": 0.7576,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 9.349,
    "megatron-bridge-26.06.01.router_s": 0.0007315,
    "megatron-bridge-26.06.01.ep_overlap": 0.7922,
    # megatron-core-unfused: Megatron's own tests
    "megatron-core-unfused.kept_score": 4.972,
    # megatron-deepspeed-2022-bf16: bigscience-bloom in bf16
    "megatron-deepspeed-2022-bf16.kept_bytes": 9.707,
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
