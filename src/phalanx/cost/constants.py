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
    "nvidia.gemm": 0.8064,
    "nvidia.gemm8": 0.5857,
    "nvidia.gemm_half": 276.1,
    "nvidia.misaligned": 0.1227,
    "nvidia.attention": 0.5874,
    "nvidia.attention_half": 488.8,
    "nvidia.memory": 0.8053,
    "nvidia.portable_attention": 0.4008,
    "nvidia.attention_backward": 0.8255,
    "nvidia.portable_backward": 0.7634,
    "nvidia.attention_narrow": 0.1937,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.8891,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9551,
    # GB300: nemo-megatron-bridge, against B300
    "GB300.clock": 1.089,
    # any: all families
    "any.hidden_bytes": 19.12,
    "any.ffn_bytes": 6.598,
    "any.backward_traffic": 1.561,
    "any.logit_bytes": 21.18,
    "any.launch_s": 3.229e-05,
    "any.launch_backward": 1.683,
    "any.launch_sync": 0.07225,
    "any.tp_overlap": 0.4097,
    "any.dp_overlap": 0.6615,
    "any.gather_overlap": 0.6055,
    "any.contention": 1.001,
    "any.ring_bytes": 18.97,
    "any.optimizer_bytes": 34.01,
    "any.step_s": 0.01078,
    "any.cast_bytes": 9.313,
    "any.fine_cast": 2.123,
    "any.token_bytes": 14.63,
    "any.grouped": 1.122,
    "any.router_s": 0.002494,
    "any.ep_overlap": 0.6018,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.7157,
    "ampere.gemm_half": 290.4,
    "ampere.attention": 0.5877,
    "ampere.portable_attention": 0.4906,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.6841,
    "hopper.gemm_half": 347.8,
    "hopper.attention": 0.6054,
    "hopper.portable_attention": 0.2917,
    "hopper.gemm8": 0.6068,
    "hopper.portable_gemm": 0.7907,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.5974,
    "blackwell.gemm_half": 299.4,
    "blackwell.attention": 0.556,
    "blackwell.portable_attention": 0.4008,
    "blackwell.gemm8": 0.5386,
    "blackwell.gemm4": 0.4032,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 17.23,
    "eager.launch_s": 3.209e-05,
    "eager.gemm": 1.002,
    "eager.dp_overlap": 0.5059,
    "eager.tp_overlap": 0.3707,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 21.72,
    "compiled.launch_s": 3.286e-05,
    "compiled.gemm": 0.9858,
    "compiled.dp_overlap": 0.4575,
    "compiled.tp_overlap": 0.3445,
    "compiled.cast_bytes": 14.89,
    "compiled.gemm8": 1.103,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 18.61,
    "megatron-core.launch_s": 3.651e-05,
    "megatron-core.gemm": 0.9805,
    "megatron-core.dp_overlap": 0.8825,
    "megatron-core.tp_overlap": 0.5688,
    "megatron-core.pp_overlap": 0.5207,
    "megatron-core.cast_bytes": 8.007,
    "megatron-core.gemm8": 1.007,
    "megatron-core.kept_logit": 5.941,
    "megatron-core.constant_bytes": 1.143e+08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 18.14,
    "megatron-2020.launch_s": 3.21e-05,
    "megatron-2020.gemm": 1.02,
    "megatron-2020.score_bytes": 6.552,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.5946,
    "blackwell-ultra.gemm8": 0.5597,
    "blackwell-ultra.gemm4": 0.4076,
    "blackwell-ultra.attention": 0.549,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.9549,
    "nanotron.hidden_bytes": 17.66,
    "nanotron.launch_s": 3.488e-05,
    "nanotron.tp_overlap": 0.4537,
    "nanotron.dp_overlap": 0.5653,
    "nanotron.launch_sync": 0.1119,
    "nanotron.list_s": 0.0003015,
    "nanotron.stalled_s": 0.3891,
    "nanotron.launch_backward": 1.843,
    "nanotron.gather_overlap": 0.579,
    "nanotron.logit_bytes": 28.73,
    "nanotron.kept_hidden": 11.1,
    "nanotron.kept_qkv": 1.126,
    "nanotron.kept_ffn": 1.344,
    "nanotron.kept_logit": 9.133,
    "nanotron.idle_bytes": 1.88,
    "nanotron.fragments": 0.06233,
    "nanotron.constant_bytes": 7.967e+07,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.07,
    "llm-foundry.hidden_bytes": 16.72,
    "llm-foundry.launch_s": 3.051e-05,
    "llm-foundry.tp_overlap": 0.3797,
    "llm-foundry.dp_overlap": 0.4225,
    "llm-foundry.attention": 0.8133,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.092,
    "torchtitan-compiled.hidden_bytes": 21.9,
    "torchtitan-compiled.launch_s": 3.117e-05,
    "torchtitan-compiled.tp_overlap": 0.3022,
    "torchtitan-compiled.dp_overlap": 0.4285,
    "torchtitan-compiled.cast_bytes": 20.01,
    "torchtitan-compiled.gemm8": 1.305,
    "torchtitan-compiled.contention": 1.723,
    "torchtitan-compiled.kept_hidden": 13.55,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 0.987,
    "torchtitan-eager.hidden_bytes": 16.89,
    "torchtitan-eager.launch_s": 3.022e-05,
    "torchtitan-eager.cast_bytes": 11.07,
    "torchtitan-eager.contention": 2,
    "torchtitan-eager.kept_hidden": 18.78,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.9659,
    "maxtext.hidden_bytes": 21.76,
    "maxtext.launch_s": 3.291e-05,
    "maxtext.tp_overlap": 0.3454,
    "maxtext.dp_overlap": 0.339,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.9045,
    "pax.hidden_bytes": 22.26,
    "pax.launch_s": 3.305e-05,
    "pax.tp_overlap": 0.3505,
    "pax.dp_overlap": 0.4481,
    "pax.cast_bytes": 18.14,
    "pax.gemm8": 0.9942,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 1.017,
    "nemo-24.11.hidden_bytes": 18.6,
    "nemo-24.11.launch_s": 3.651e-05,
    "nemo-24.11.tp_overlap": 0.6016,
    "nemo-24.11.dp_overlap": 0.8881,
    "nemo-24.11.token_bytes": 14.4,
    "nemo-24.11.router_s": 0.002467,
    "nemo-24.11.ep_overlap": 0.6422,
    "nemo-24.11.cast_bytes": 7.712,
    "nemo-24.11.gemm8": 1.002,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.04,
    "megatron-2021.hidden_bytes": 15.8,
    "megatron-2021.launch_s": 3.124e-05,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 0.9739,
    "megatron-bridge-25.09.hidden_bytes": 18.64,
    "megatron-bridge-25.09.launch_s": 3.651e-05,
    "megatron-bridge-25.09.tp_overlap": 0.615,
    "megatron-bridge-25.09.dp_overlap": 0.8838,
    "megatron-bridge-25.09.cast_bytes": 7.149,
    "megatron-bridge-25.09.gemm8": 1.021,
    "megatron-bridge-25.09.contention": 1.136,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.9007,
    "simumax-b200.hidden_bytes": 18.59,
    "simumax-b200.launch_s": 5.917e-05,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 0.9557,
    "nemo-24.03.hidden_bytes": 19.07,
    "nemo-24.03.launch_s": 3.651e-05,
    "nemo-24.03.attention": 0.6415,
    # megatron-2022: vtrain
    "megatron-2022.gemm": 1.07,
    "megatron-2022.hidden_bytes": 14.94,
    "megatron-2022.launch_s": 3.03e-05,
    "megatron-2022.launch_sync": 0.1059,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.8872,
    "megatron-deepspeed-2022.hidden_bytes": 16.74,
    "megatron-deepspeed-2022.launch_s": 3.122e-05,
    "megatron-deepspeed-2022.kept_bytes": 6.937,
    "megatron-deepspeed-2022.whole_bytes": 22.79,
    "megatron-deepspeed-2022.kept_hidden": 10.62,
    "megatron-deepspeed-2022.context_bytes": 3.544e+09,
    "megatron-deepspeed-2022.kept_logit": 6.532,
    "megatron-deepspeed-2022.fragments": 0.06296,
    # nemo-25.04: NeMo 25.04 of nvidia-dgxc-benchmarking
    "nemo-25.04.gemm": 1.069,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 0.9875,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.03,
    "megatron-bridge-26.04.token_bytes": 16.48,
    "megatron-bridge-26.04.router_s": 0.002031,
    "megatron-bridge-26.04.ep_overlap": 0.7116,
    # nemo-25.05: NeMo 25.05 of nvidia-dgxc-benchmarking
    "nemo-25.05.token_bytes": 13.96,
    "nemo-25.05.router_s": 0.001032,
    "nemo-25.05.ep_overlap": 0.683,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.025,
    "megatron-bridge-26.06.token_bytes": 13.3,
    "megatron-bridge-26.06.router_s": 0.001248,
    "megatron-bridge-26.06.ep_overlap": 0.7049,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 11.25,
    "megatron-bridge-26.06.01.router_s": 0.0008311,
    "megatron-bridge-26.06.01.ep_overlap": 0.7383,
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
