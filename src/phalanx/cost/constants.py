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
    "nvidia.gemm": 0.7403,
    "nvidia.gemm_half": 466.2,
    "nvidia.attention": 0.5058,
    "nvidia.attention_half": 418.2,
    "nvidia.memory": 0.7972,
    "nvidia.portable_attention": 0.41,
    "nvidia.attention_backward": 0.7083,
    "nvidia.attention_narrow": 0.1785,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.7852,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9477,
    # any: all families
    "any.hidden_bytes": 16.54,
    "any.ffn_bytes": 6.56,
    "any.backward_traffic": 1.519,
    "any.logit_bytes": 17.91,
    "any.launch_s": 2.845e-05,
    "any.launch_backward": 1.7,
    "any.launch_sync": 0.1408,
    "any.tp_overlap": 0.2439,
    "any.dp_overlap": 0.8735,
    "any.gather_overlap": 0.595,
    "any.contention": 1,
    "any.optimizer_bytes": 34.73,
    "any.step_s": 0.01211,
    "any.cast_bytes": 18.19,
    "any.fine_cast": 2.008,
    "any.token_bytes": 14.87,
    "any.grouped": 1.033,
    "any.router_s": 0.001879,
    "any.ep_overlap": 0.6311,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.7242,
    "ampere.gemm_half": 676,
    "ampere.attention": 0.5058,
    "ampere.portable_attention": 0.4331,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.6656,
    "hopper.gemm_half": 711.2,
    "hopper.attention": 0.4328,
    "hopper.portable_attention": 0.3723,
    "hopper.gemm8": 0.6214,
    "hopper.portable_gemm": 0.8034,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.606,
    "blackwell.gemm_half": 673.5,
    "blackwell.attention": 0.4836,
    "blackwell.portable_attention": 0.41,
    "blackwell.gemm8": 0.5552,
    "blackwell.gemm4": 0.4473,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 16.08,
    "eager.launch_s": 2.789e-05,
    "eager.gemm": 0.9842,
    "eager.dp_overlap": 0.8814,
    "eager.tp_overlap": 0.1488,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 17.25,
    "compiled.launch_s": 2.845e-05,
    "compiled.gemm": 0.946,
    "compiled.dp_overlap": 0.8945,
    "compiled.tp_overlap": 0.2717,
    "compiled.cast_bytes": 18.21,
    "compiled.gemm8": 1.078,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 14.93,
    "megatron-core.launch_s": 2.845e-05,
    "megatron-core.gemm": 0.9878,
    "megatron-core.dp_overlap": 0.9392,
    "megatron-core.tp_overlap": 0.2792,
    "megatron-core.cast_bytes": 11.72,
    "megatron-core.gemm8": 1.029,
    "megatron-core.kept_logit": 5.959,
    "megatron-core.constant_bytes": 1.134e08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 12.89,
    "megatron-2020.launch_s": 2.325e-05,
    "megatron-2020.gemm": 1.1,
    "megatron-2020.score_bytes": 1e-09,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.604,
    "blackwell-ultra.gemm8": 0.5835,
    "blackwell-ultra.gemm4": 0.4576,
    "blackwell-ultra.attention": 0.4981,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.9556,
    "nanotron.hidden_bytes": 15.92,
    "nanotron.launch_s": 2.733e-05,
    "nanotron.tp_overlap": 0.1102,
    "nanotron.dp_overlap": 0.8856,
    "nanotron.launch_sync": 0.5782,
    "nanotron.listed": 4.6,
    "nanotron.launch_backward": 1.892,
    "nanotron.gather_overlap": 0.5468,
    "nanotron.logit_bytes": 21.1,
    "nanotron.kept_whole": 1.141,
    "nanotron.idle_bytes": 2.24,
    "nanotron.kept_hidden": 12.97,
    "nanotron.kept_qkv": 1.198,
    "nanotron.kept_ffn": 1.368,
    "nanotron.kept_logit": 9.972,
    "nanotron.fragments": 0.06186,
    "nanotron.constant_bytes": 1.031e08,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.097,
    "llm-foundry.hidden_bytes": 15.92,
    "llm-foundry.launch_s": 2.789e-05,
    "llm-foundry.tp_overlap": 0.1488,
    "llm-foundry.dp_overlap": 0.8814,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.101,
    "torchtitan-compiled.hidden_bytes": 17.21,
    "torchtitan-compiled.launch_s": 2.845e-05,
    "torchtitan-compiled.tp_overlap": 0.2882,
    "torchtitan-compiled.dp_overlap": 0.8945,
    "torchtitan-compiled.cast_bytes": 19.67,
    "torchtitan-compiled.gemm8": 1.028,
    "torchtitan-compiled.kept_hidden": 3.678,
    "torchtitan-compiled.kept_qkv": 0.4164,
    "torchtitan-compiled.kept_ffn": 0.4179,
    "torchtitan-compiled.kept_logit": 13.31,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 0.8776,
    "torchtitan-eager.hidden_bytes": 16.3,
    "torchtitan-eager.launch_s": 2.789e-05,
    "torchtitan-eager.cast_bytes": 57.42,
    "torchtitan-eager.kept_hidden": 4.51,
    "torchtitan-eager.kept_ffn": 0.7016,
    "torchtitan-eager.kept_logit": 6.068,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.8607,
    "maxtext.hidden_bytes": 17.16,
    "maxtext.launch_s": 2.845e-05,
    "maxtext.tp_overlap": 0.2717,
    "maxtext.dp_overlap": 0.8739,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.7887,
    "pax.hidden_bytes": 17.56,
    "pax.launch_s": 2.845e-05,
    "pax.tp_overlap": 0.2717,
    "pax.dp_overlap": 0.921,
    "pax.cast_bytes": 23.48,
    "pax.gemm8": 1.031,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.7453,
    "simumax-b200.hidden_bytes": 15,
    "simumax-b200.launch_s": 2.845e-05,
    "simumax-b200.tp_overlap": 0.1886,
    "simumax-b200.dp_overlap": 0.9386,
    "simumax-b200.kept_logit": 9.822,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 1.173,
    "nemo-24.11.hidden_bytes": 14.8,
    "nemo-24.11.launch_s": 2.845e-05,
    "nemo-24.11.tp_overlap": 0.3386,
    "nemo-24.11.dp_overlap": 0.9415,
    "nemo-24.11.token_bytes": 15.02,
    "nemo-24.11.router_s": 0.001974,
    "nemo-24.11.ep_overlap": 0.6695,
    "nemo-24.11.cast_bytes": 10.44,
    "nemo-24.11.gemm8": 1.013,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.124,
    "megatron-2021.hidden_bytes": 11.57,
    "megatron-2021.launch_s": 2.59e-05,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 1.03,
    "megatron-bridge-25.09.hidden_bytes": 14.76,
    "megatron-bridge-25.09.launch_s": 2.845e-05,
    "megatron-bridge-25.09.tp_overlap": 0.3401,
    "megatron-bridge-25.09.dp_overlap": 0.9394,
    "megatron-bridge-25.09.cast_bytes": 8.466,
    "megatron-bridge-25.09.gemm8": 1.074,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 0.9995,
    "nemo-24.03.hidden_bytes": 15.13,
    "nemo-24.03.launch_s": 2.845e-05,
    # megatron-2022: vtrain
    "megatron-2022.gemm": 1.142,
    "megatron-2022.hidden_bytes": 11.34,
    "megatron-2022.launch_s": 2.886e-05,
    "megatron-2022.launch_sync": 0.2609,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.944,
    "megatron-deepspeed-2022.hidden_bytes": 11.8,
    "megatron-deepspeed-2022.launch_s": 2.59e-05,
    "megatron-deepspeed-2022.kept_bytes": 7.754,
    "megatron-deepspeed-2022.kept_hidden": 9.136,
    "megatron-deepspeed-2022.context_bytes": 2.908e09,
    "megatron-deepspeed-2022.kept_logit": 4.872,
    "megatron-deepspeed-2022.fragments": 0.05644,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 1.03,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.097,
    "megatron-bridge-26.04.token_bytes": 15.54,
    "megatron-bridge-26.04.router_s": 0.001708,
    "megatron-bridge-26.04.ep_overlap": 0.7353,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.104,
    "megatron-bridge-26.06.token_bytes": 12.58,
    "megatron-bridge-26.06.router_s": 0.001078,
    "megatron-bridge-26.06.ep_overlap": 0.7331,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 10.55,
    "megatron-bridge-26.06.01.router_s": 0.0007043,
    "megatron-bridge-26.06.01.ep_overlap": 0.7719,
    # megatron-core-unfused: Megatron's own tests
    "megatron-core-unfused.kept_score": 4.964,
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
