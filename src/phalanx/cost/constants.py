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
    "nvidia.gemm": 0.7983,
    "nvidia.gemm8": 0.6009,
    "nvidia.gemm_half": 449.5,
    "nvidia.attention": 0.4951,
    "nvidia.attention_half": 422.2,
    "nvidia.memory": 0.7978,
    "nvidia.portable_attention": 0.4147,
    "nvidia.attention_backward": 0.7376,
    "nvidia.attention_narrow": 0.1816,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.9147,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9404,
    # any: all families
    "any.hidden_bytes": 16.45,
    "any.ffn_bytes": 6.354,
    "any.backward_traffic": 1.515,
    "any.logit_bytes": 19.54,
    "any.launch_s": 3.518e-05,
    "any.launch_backward": 1.657,
    "any.launch_sync": 0.07796,
    "any.tp_overlap": 0.3119,
    "any.dp_overlap": 0.7804,
    "any.gather_overlap": 0.5934,
    "any.contention": 1,
    "any.optimizer_bytes": 30.23,
    "any.step_s": 0.01089,
    "any.cast_bytes": 9.917,
    "any.fine_cast": 2.156,
    "any.token_bytes": 13.68,
    "any.grouped": 1.039,
    "any.router_s": 0.00211,
    "any.ep_overlap": 0.6378,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.7594,
    "ampere.gemm_half": 637.5,
    "ampere.attention": 0.4949,
    "ampere.portable_attention": 0.5187,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.6985,
    "hopper.gemm_half": 597.9,
    "hopper.attention": 0.4144,
    "hopper.portable_attention": 0.3102,
    "hopper.gemm8": 0.646,
    "hopper.portable_gemm": 0.8061,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.635,
    "blackwell.gemm_half": 518.5,
    "blackwell.attention": 0.467,
    "blackwell.portable_attention": 0.4147,
    "blackwell.gemm8": 0.5576,
    "blackwell.gemm4": 0.4379,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 15.77,
    "eager.launch_s": 3.573e-05,
    "eager.gemm": 0.9973,
    "eager.dp_overlap": 0.6633,
    "eager.tp_overlap": 0.4099,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 17.34,
    "compiled.launch_s": 3.547e-05,
    "compiled.gemm": 0.9929,
    "compiled.dp_overlap": 0.8154,
    "compiled.tp_overlap": 0.2669,
    "compiled.cast_bytes": 15.17,
    "compiled.gemm8": 1.118,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 15.36,
    "megatron-core.launch_s": 3.934e-05,
    "megatron-core.gemm": 1.019,
    "megatron-core.dp_overlap": 0.9082,
    "megatron-core.tp_overlap": 0.3476,
    "megatron-core.cast_bytes": 8.417,
    "megatron-core.gemm8": 1.022,
    "megatron-core.kept_logit": 5.96,
    "megatron-core.constant_bytes": 1.134e+08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 13.35,
    "megatron-2020.launch_s": 3.475e-05,
    "megatron-2020.gemm": 1.023,
    "megatron-2020.score_bytes": 9.985e-10,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.6333,
    "blackwell-ultra.gemm8": 0.5952,
    "blackwell-ultra.gemm4": 0.4475,
    "blackwell-ultra.attention": 0.4856,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.6933,
    "simumax-b200.hidden_bytes": 15.34,
    "simumax-b200.launch_s": 5.953e-05,
    "simumax-b200.tp_overlap": 0.2748,
    "simumax-b200.dp_overlap": 0.9065,
    "simumax-b200.kept_logit": 9.823,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.9369,
    "nanotron.hidden_bytes": 15.92,
    "nanotron.launch_s": 3.741e-05,
    "nanotron.tp_overlap": 0.471,
    "nanotron.dp_overlap": 0.6574,
    "nanotron.launch_sync": 0.0985,
    "nanotron.list_s": 0.000301,
    "nanotron.launch_backward": 1.681,
    "nanotron.gather_overlap": 0.5439,
    "nanotron.logit_bytes": 25.53,
    "nanotron.kept_whole": 3.121,
    "nanotron.kept_behind": 0.6188,
    "nanotron.kept_hidden": 11.55,
    "nanotron.kept_qkv": 1.154,
    "nanotron.kept_ffn": 1.391,
    "nanotron.kept_logit": 8.887,
    "nanotron.idle_bytes": 2.001,
    "nanotron.fragments": 0.06106,
    "nanotron.constant_bytes": 1.107e+08,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.057,
    "llm-foundry.hidden_bytes": 15.42,
    "llm-foundry.launch_s": 3.563e-05,
    "llm-foundry.tp_overlap": 0.4072,
    "llm-foundry.dp_overlap": 0.6361,
    "llm-foundry.attention": 0.7908,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.063,
    "torchtitan-compiled.hidden_bytes": 17.08,
    "torchtitan-compiled.launch_s": 3.583e-05,
    "torchtitan-compiled.tp_overlap": 0.2275,
    "torchtitan-compiled.dp_overlap": 0.7073,
    "torchtitan-compiled.cast_bytes": 18.69,
    "torchtitan-compiled.gemm8": 1.289,
    "torchtitan-compiled.contention": 1.9,
    "torchtitan-compiled.kept_hidden": 3.678,
    "torchtitan-compiled.kept_qkv": 0.4164,
    "torchtitan-compiled.kept_ffn": 0.4179,
    "torchtitan-compiled.kept_logit": 13.31,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 0.9944,
    "torchtitan-eager.hidden_bytes": 15.85,
    "torchtitan-eager.launch_s": 3.58e-05,
    "torchtitan-eager.cast_bytes": 11.08,
    "torchtitan-eager.contention": 2.121,
    "torchtitan-eager.kept_hidden": 4.51,
    "torchtitan-eager.kept_ffn": 0.7016,
    "torchtitan-eager.kept_logit": 6.068,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.9893,
    "maxtext.hidden_bytes": 17.27,
    "maxtext.launch_s": 3.527e-05,
    "maxtext.tp_overlap": 0.2622,
    "maxtext.dp_overlap": 0.8067,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.9144,
    "pax.hidden_bytes": 17.92,
    "pax.launch_s": 3.653e-05,
    "pax.tp_overlap": 0.2905,
    "pax.dp_overlap": 0.8831,
    "pax.cast_bytes": 20.63,
    "pax.gemm8": 1.001,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 1.092,
    "nemo-24.11.hidden_bytes": 15.29,
    "nemo-24.11.launch_s": 3.934e-05,
    "nemo-24.11.tp_overlap": 0.3955,
    "nemo-24.11.dp_overlap": 0.9131,
    "nemo-24.11.token_bytes": 13.77,
    "nemo-24.11.router_s": 0.002044,
    "nemo-24.11.ep_overlap": 0.6789,
    "nemo-24.11.cast_bytes": 8.156,
    "nemo-24.11.gemm8": 0.9814,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.052,
    "megatron-2021.hidden_bytes": 12.92,
    "megatron-2021.launch_s": 3.236e-05,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 1.018,
    "megatron-bridge-25.09.hidden_bytes": 15.3,
    "megatron-bridge-25.09.launch_s": 3.934e-05,
    "megatron-bridge-25.09.tp_overlap": 0.3908,
    "megatron-bridge-25.09.dp_overlap": 0.9096,
    "megatron-bridge-25.09.cast_bytes": 7.369,
    "megatron-bridge-25.09.gemm8": 1.085,
    "megatron-bridge-25.09.contention": 1.129,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 0.9628,
    "nemo-24.03.hidden_bytes": 15.94,
    "nemo-24.03.launch_s": 3.934e-05,
    # megatron-2022: vtrain
    "megatron-2022.gemm": 1.072,
    "megatron-2022.hidden_bytes": 12.67,
    "megatron-2022.launch_s": 3.001e-05,
    "megatron-2022.launch_sync": 0.1296,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.9014,
    "megatron-deepspeed-2022.hidden_bytes": 13.36,
    "megatron-deepspeed-2022.launch_s": 3.235e-05,
    "megatron-deepspeed-2022.kept_bytes": 7.004,
    "megatron-deepspeed-2022.whole_bytes": 22.67,
    "megatron-deepspeed-2022.kept_hidden": 10.04,
    "megatron-deepspeed-2022.context_bytes": 3.315e+09,
    "megatron-deepspeed-2022.kept_logit": 3.846,
    "megatron-deepspeed-2022.fragments": 0.06047,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 1.036,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.066,
    "megatron-bridge-26.04.token_bytes": 14.19,
    "megatron-bridge-26.04.router_s": 0.00185,
    "megatron-bridge-26.04.ep_overlap": 0.7499,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.05,
    "megatron-bridge-26.06.token_bytes": 11.6,
    "megatron-bridge-26.06.router_s": 0.001124,
    "megatron-bridge-26.06.ep_overlap": 0.7505,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 9.84,
    "megatron-bridge-26.06.01.router_s": 0.0007276,
    "megatron-bridge-26.06.01.ep_overlap": 0.7856,
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
