"""What was measured of stacks and chips: fitted on the published runs that ship with Phalanx.

Written by `python -m benchmarks calibrate --write`; what each field means stands with its class (Profile,
Generation), from whose defaults the fit starts.
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
    "hopper.reduce_gain": 1.472,
    "blackwell.nvlink": 0.7426,
    "blackwell.reduce_gain": 1.264,
    # nvidia: all families on NVIDIA's chips
    "nvidia.gemm": 0.8072,
    "nvidia.gemm8": 0.5874,
    "nvidia.gemm_half": 287.9,
    "nvidia.misaligned": 0.1264,
    "nvidia.attention": 0.587,
    "nvidia.attention_half": 486.5,
    "nvidia.memory": 0.7994,
    "nvidia.portable_attention": 0.4042,
    "nvidia.attention_backward": 0.8258,
    "nvidia.portable_backward": 0.7654,
    "nvidia.attention_narrow": 0.1935,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.8941,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9549,
    # GB300: nemo-megatron-bridge, against B300
    "GB300.clock": 1.09,
    # any: all families
    "any.hidden_bytes": 19.01,
    "any.ffn_bytes": 6.671,
    "any.backward_traffic": 1.564,
    "any.logit_bytes": 20.73,
    "any.launch_s": 3.258e-05,
    "any.launch_backward": 1.586,
    "any.launch_sync": 0.07491,
    "any.tp_overlap": 0.4074,
    "any.dp_overlap": 0.697,
    "any.gather_overlap": 0.6028,
    "any.contention": 1,
    "any.ring_bytes": 19.02,
    "any.optimizer_bytes": 30.18,
    "any.step_s": 0.01097,
    "any.cast_bytes": 9.387,
    "any.fine_cast": 2.117,
    "any.token_bytes": 13,
    "any.grouped": 1.121,
    "any.router_s": 0.00251,
    "any.ep_overlap": 0.5967,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.7198,
    "ampere.gemm_half": 310.4,
    "ampere.attention": 0.5873,
    "ampere.portable_attention": 0.4972,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.6853,
    "hopper.gemm_half": 363.5,
    "hopper.attention": 0.6049,
    "hopper.portable_attention": 0.2969,
    "hopper.gemm8": 0.6104,
    "hopper.portable_gemm": 0.7886,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.5979,
    "blackwell.gemm_half": 313.2,
    "blackwell.attention": 0.5555,
    "blackwell.portable_attention": 0.4042,
    "blackwell.gemm8": 0.541,
    "blackwell.gemm4": 0.4045,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 17.4,
    "eager.launch_s": 3.229e-05,
    "eager.gemm": 1,
    "eager.dp_overlap": 0.5199,
    "eager.tp_overlap": 0.3681,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 20.15,
    "compiled.launch_s": 3.3e-05,
    "compiled.gemm": 0.9878,
    "compiled.dp_overlap": 0.4691,
    "compiled.tp_overlap": 0.3689,
    "compiled.cast_bytes": 14.18,
    "compiled.gemm8": 1.093,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 18.49,
    "megatron-core.launch_s": 3.703e-05,
    "megatron-core.gemm": 0.9808,
    "megatron-core.dp_overlap": 0.8874,
    "megatron-core.tp_overlap": 0.5704,
    "megatron-core.pp_overlap": 0.5211,
    "megatron-core.cast_bytes": 8.014,
    "megatron-core.gemm8": 1.005,
    "megatron-core.kept_logit": 5.941,
    "megatron-core.constant_bytes": 1.143e+08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 17.86,
    "megatron-2020.launch_s": 3.244e-05,
    "megatron-2020.gemm": 1.02,
    "megatron-2020.score_bytes": 6.302,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.5951,
    "blackwell-ultra.gemm8": 0.5623,
    "blackwell-ultra.gemm4": 0.4087,
    "blackwell-ultra.attention": 0.5491,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.9538,
    "nanotron.hidden_bytes": 18.25,
    "nanotron.launch_s": 3.541e-05,
    "nanotron.tp_overlap": 0.4683,
    "nanotron.dp_overlap": 0.592,
    "nanotron.launch_sync": 0.1305,
    "nanotron.list_s": 0.0003021,
    "nanotron.stalled_s": 0.3923,
    "nanotron.launch_backward": 1.766,
    "nanotron.gather_overlap": 0.6841,
    "nanotron.logit_bytes": 28.75,
    "nanotron.kept_hidden": 11.1,
    "nanotron.kept_qkv": 1.126,
    "nanotron.kept_ffn": 1.344,
    "nanotron.kept_logit": 9.133,
    "nanotron.idle_bytes": 1.88,
    "nanotron.fragments": 0.06233,
    "nanotron.constant_bytes": 7.967e+07,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.067,
    "llm-foundry.hidden_bytes": 16.48,
    "llm-foundry.launch_s": 2.94e-05,
    "llm-foundry.tp_overlap": 0.2923,
    "llm-foundry.dp_overlap": 0.393,
    "llm-foundry.attention": 0.8012,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.069,
    "torchtitan-compiled.hidden_bytes": 21.07,
    "torchtitan-compiled.launch_s": 3.724e-05,
    "torchtitan-compiled.tp_overlap": 0.4166,
    "torchtitan-compiled.dp_overlap": 0.4762,
    "torchtitan-compiled.cast_bytes": 20.11,
    "torchtitan-compiled.gemm8": 1.306,
    "torchtitan-compiled.contention": 1.772,
    "torchtitan-compiled.kept_hidden": 13.55,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 0.9835,
    "torchtitan-eager.hidden_bytes": 17.05,
    "torchtitan-eager.launch_s": 3.059e-05,
    "torchtitan-eager.cast_bytes": 9.683,
    "torchtitan-eager.contention": 2.005,
    "torchtitan-eager.kept_hidden": 18.78,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.9685,
    "maxtext.hidden_bytes": 20.08,
    "maxtext.launch_s": 3.247e-05,
    "maxtext.tp_overlap": 0.3535,
    "maxtext.dp_overlap": 0.3401,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.9058,
    "pax.hidden_bytes": 20.36,
    "pax.launch_s": 3.212e-05,
    "pax.tp_overlap": 0.342,
    "pax.dp_overlap": 0.501,
    "pax.cast_bytes": 16.16,
    "pax.gemm8": 0.9701,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 1.018,
    "nemo-24.11.hidden_bytes": 18.48,
    "nemo-24.11.launch_s": 3.703e-05,
    "nemo-24.11.tp_overlap": 0.6035,
    "nemo-24.11.dp_overlap": 0.8923,
    "nemo-24.11.token_bytes": 12.84,
    "nemo-24.11.router_s": 0.002464,
    "nemo-24.11.ep_overlap": 0.6375,
    "nemo-24.11.cast_bytes": 7.702,
    "nemo-24.11.gemm8": 0.9971,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.038,
    "megatron-2021.hidden_bytes": 16.78,
    "megatron-2021.launch_s": 3.169e-05,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 0.9739,
    "megatron-bridge-25.09.hidden_bytes": 18.52,
    "megatron-bridge-25.09.launch_s": 3.703e-05,
    "megatron-bridge-25.09.tp_overlap": 0.6176,
    "megatron-bridge-25.09.dp_overlap": 0.8887,
    "megatron-bridge-25.09.cast_bytes": 7.124,
    "megatron-bridge-25.09.gemm8": 1.018,
    "megatron-bridge-25.09.contention": 1.139,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.9013,
    "simumax-b200.hidden_bytes": 18.47,
    "simumax-b200.launch_s": 6.114e-05,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 0.9564,
    "nemo-24.03.hidden_bytes": 18.93,
    "nemo-24.03.launch_s": 3.703e-05,
    "nemo-24.03.attention": 0.6417,
    # megatron-2022: vtrain
    "megatron-2022.gemm": 1.061,
    "megatron-2022.hidden_bytes": 15.79,
    "megatron-2022.launch_s": 3.085e-05,
    "megatron-2022.launch_sync": 0.1196,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.8838,
    "megatron-deepspeed-2022.hidden_bytes": 17.75,
    "megatron-deepspeed-2022.launch_s": 3.168e-05,
    "megatron-deepspeed-2022.kept_bytes": 6.937,
    "megatron-deepspeed-2022.whole_bytes": 22.79,
    "megatron-deepspeed-2022.kept_hidden": 10.62,
    "megatron-deepspeed-2022.context_bytes": 3.544e+09,
    "megatron-deepspeed-2022.kept_logit": 6.532,
    "megatron-deepspeed-2022.fragments": 0.06296,
    # nemo-25.04: NeMo 25.04 of nvidia-dgxc-benchmarking
    "nemo-25.04.gemm": 1.07,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 0.9873,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.03,
    "megatron-bridge-26.04.token_bytes": 14.11,
    "megatron-bridge-26.04.router_s": 0.002078,
    "megatron-bridge-26.04.ep_overlap": 0.7075,
    # nemo-25.05: NeMo 25.05 of nvidia-dgxc-benchmarking
    "nemo-25.05.token_bytes": 12.5,
    "nemo-25.05.router_s": 0.001031,
    "nemo-25.05.ep_overlap": 0.6791,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.024,
    "megatron-bridge-26.06.token_bytes": 11.74,
    "megatron-bridge-26.06.router_s": 0.001259,
    "megatron-bridge-26.06.ep_overlap": 0.6997,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 10.2,
    "megatron-bridge-26.06.01.router_s": 0.0008395,
    "megatron-bridge-26.06.01.ep_overlap": 0.7324,
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
