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
    "nvidia.gemm": 0.7893,
    "nvidia.gemm8": 0.5969,
    "nvidia.gemm_half": 445,
    "nvidia.attention": 0.4956,
    "nvidia.attention_half": 422.7,
    "nvidia.memory": 0.7979,
    "nvidia.portable_attention": 0.4149,
    "nvidia.attention_backward": 0.7404,
    "nvidia.attention_narrow": 0.1817,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.9104,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9782,
    # any: all families
    "any.hidden_bytes": 16.42,
    "any.ffn_bytes": 6.382,
    "any.backward_traffic": 1.513,
    "any.logit_bytes": 19.22,
    "any.launch_s": 3.645e-05,
    "any.launch_backward": 1.708,
    "any.launch_sync": 0.07745,
    "any.tp_overlap": 0.3127,
    "any.dp_overlap": 0.8012,
    "any.gather_overlap": 0.6015,
    "any.contention": 1,
    "any.optimizer_bytes": 30.19,
    "any.step_s": 0.01095,
    "any.cast_bytes": 9.908,
    "any.fine_cast": 2.167,
    "any.token_bytes": 16.04,
    "any.grouped": 1.043,
    "any.router_s": 0.002006,
    "any.ep_overlap": 0.632,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.7536,
    "ampere.gemm_half": 635.4,
    "ampere.attention": 0.4953,
    "ampere.portable_attention": 0.5203,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.6906,
    "hopper.gemm_half": 608.9,
    "hopper.attention": 0.4133,
    "hopper.portable_attention": 0.3108,
    "hopper.gemm8": 0.6381,
    "hopper.portable_gemm": 0.8136,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.4532,
    "blackwell.gemm_half": 505.5,
    "blackwell.attention": 0.4746,
    "blackwell.portable_attention": 0.4149,
    "blackwell.gemm8": 0.5518,
    "blackwell.gemm4": 0.4332,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 15.71,
    "eager.launch_s": 3.676e-05,
    "eager.gemm": 0.9997,
    "eager.dp_overlap": 0.675,
    "eager.tp_overlap": 0.409,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 16.88,
    "compiled.launch_s": 3.655e-05,
    "compiled.gemm": 0.9924,
    "compiled.dp_overlap": 0.8458,
    "compiled.tp_overlap": 0.2526,
    "compiled.cast_bytes": 14.75,
    "compiled.gemm8": 1.112,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 15.36,
    "megatron-core.launch_s": 4.153e-05,
    "megatron-core.gemm": 1.016,
    "megatron-core.dp_overlap": 0.9095,
    "megatron-core.tp_overlap": 0.3339,
    "megatron-core.cast_bytes": 8.463,
    "megatron-core.gemm8": 1.026,
    "megatron-core.kept_logit": 5.96,
    "megatron-core.constant_bytes": 1.134e+08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 13.1,
    "megatron-2020.launch_s": 3.575e-05,
    "megatron-2020.gemm": 1.028,
    "megatron-2020.score_bytes": 9.982e-10,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.4508,
    "blackwell-ultra.gemm8": 0.5934,
    "blackwell-ultra.gemm4": 0.4435,
    "blackwell-ultra.attention": 0.4964,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.9388,
    "nanotron.hidden_bytes": 15.82,
    "nanotron.launch_s": 3.745e-05,
    "nanotron.tp_overlap": 0.4694,
    "nanotron.dp_overlap": 0.6665,
    "nanotron.launch_sync": 0.09632,
    "nanotron.list_s": 0.0003009,
    "nanotron.launch_backward": 1.684,
    "nanotron.gather_overlap": 0.5495,
    "nanotron.logit_bytes": 25.22,
    "nanotron.kept_whole": 3.085,
    "nanotron.kept_behind": 0.6178,
    "nanotron.kept_hidden": 11.75,
    "nanotron.kept_qkv": 1.141,
    "nanotron.kept_ffn": 1.388,
    "nanotron.kept_logit": 8.917,
    "nanotron.idle_bytes": 2.006,
    "nanotron.fragments": 0.06056,
    "nanotron.constant_bytes": 1.11e+08,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.063,
    "llm-foundry.hidden_bytes": 15.37,
    "llm-foundry.launch_s": 3.665e-05,
    "llm-foundry.tp_overlap": 0.4062,
    "llm-foundry.dp_overlap": 0.6481,
    "llm-foundry.attention": 0.7872,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.056,
    "torchtitan-compiled.hidden_bytes": 16.72,
    "torchtitan-compiled.launch_s": 3.697e-05,
    "torchtitan-compiled.tp_overlap": 0.2226,
    "torchtitan-compiled.dp_overlap": 0.7943,
    "torchtitan-compiled.cast_bytes": 18.52,
    "torchtitan-compiled.gemm8": 1.252,
    "torchtitan-compiled.contention": 1.826,
    "torchtitan-compiled.kept_hidden": 3.678,
    "torchtitan-compiled.kept_qkv": 0.4164,
    "torchtitan-compiled.kept_ffn": 0.4179,
    "torchtitan-compiled.kept_logit": 13.31,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 0.9996,
    "torchtitan-eager.hidden_bytes": 15.78,
    "torchtitan-eager.launch_s": 3.683e-05,
    "torchtitan-eager.cast_bytes": 11.11,
    "torchtitan-eager.contention": 2.127,
    "torchtitan-eager.kept_hidden": 4.51,
    "torchtitan-eager.kept_ffn": 0.7016,
    "torchtitan-eager.kept_logit": 6.068,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.9914,
    "maxtext.hidden_bytes": 16.63,
    "maxtext.launch_s": 3.548e-05,
    "maxtext.tp_overlap": 0.2308,
    "maxtext.dp_overlap": 0.816,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.9162,
    "pax.hidden_bytes": 17.42,
    "pax.launch_s": 3.765e-05,
    "pax.tp_overlap": 0.2756,
    "pax.dp_overlap": 0.8975,
    "pax.cast_bytes": 19.92,
    "pax.gemm8": 0.9928,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.9704,
    "simumax-b200.hidden_bytes": 15.36,
    "simumax-b200.launch_s": 5.845e-05,
    "simumax-b200.tp_overlap": 0.2626,
    "simumax-b200.dp_overlap": 0.9079,
    "simumax-b200.kept_logit": 9.823,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 1.107,
    "nemo-24.11.hidden_bytes": 15.29,
    "nemo-24.11.launch_s": 4.153e-05,
    "nemo-24.11.tp_overlap": 0.3883,
    "nemo-24.11.dp_overlap": 0.9135,
    "nemo-24.11.token_bytes": 16.15,
    "nemo-24.11.router_s": 0.002047,
    "nemo-24.11.ep_overlap": 0.6721,
    "nemo-24.11.cast_bytes": 8.109,
    "nemo-24.11.gemm8": 0.9828,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.059,
    "megatron-2021.hidden_bytes": 12.68,
    "megatron-2021.launch_s": 3.26e-05,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 1.026,
    "megatron-bridge-25.09.hidden_bytes": 15.27,
    "megatron-bridge-25.09.launch_s": 4.156e-05,
    "megatron-bridge-25.09.tp_overlap": 0.3691,
    "megatron-bridge-25.09.dp_overlap": 0.9115,
    "megatron-bridge-25.09.cast_bytes": 7.546,
    "megatron-bridge-25.09.gemm8": 1.1,
    "megatron-bridge-25.09.contention": 1.184,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 0.9746,
    "nemo-24.03.hidden_bytes": 15.95,
    "nemo-24.03.launch_s": 4.153e-05,
    # megatron-2022: vtrain
    "megatron-2022.gemm": 1.079,
    "megatron-2022.hidden_bytes": 12.44,
    "megatron-2022.launch_s": 2.961e-05,
    "megatron-2022.launch_sync": 0.1283,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.9074,
    "megatron-deepspeed-2022.hidden_bytes": 13.1,
    "megatron-deepspeed-2022.launch_s": 3.259e-05,
    "megatron-deepspeed-2022.kept_bytes": 7.004,
    "megatron-deepspeed-2022.whole_bytes": 22.67,
    "megatron-deepspeed-2022.kept_hidden": 10.04,
    "megatron-deepspeed-2022.context_bytes": 3.315e+09,
    "megatron-deepspeed-2022.kept_logit": 3.846,
    "megatron-deepspeed-2022.fragments": 0.06047,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 1.037,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.071,
    "megatron-bridge-26.04.token_bytes": 16.73,
    "megatron-bridge-26.04.router_s": 0.001693,
    "megatron-bridge-26.04.ep_overlap": 0.7288,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.06,
    "megatron-bridge-26.06.token_bytes": 13.26,
    "megatron-bridge-26.06.router_s": 0.001052,
    "megatron-bridge-26.06.ep_overlap": 0.7303,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 11.04,
    "megatron-bridge-26.06.01.router_s": 0.0007006,
    "megatron-bridge-26.06.01.ep_overlap": 0.7681,
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
