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
    "nvidia.gemm": 0.7398,
    "nvidia.gemm_half": 468.2,
    "nvidia.attention": 0.506,
    "nvidia.attention_half": 418.3,
    "nvidia.memory": 0.7972,
    "nvidia.portable_attention": 0.4099,
    "nvidia.attention_backward": 0.7081,
    "nvidia.attention_narrow": 0.1783,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.7852,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9477,
    # any: all families
    "any.hidden_bytes": 16.55,
    "any.ffn_bytes": 6.562,
    "any.backward_traffic": 1.519,
    "any.logit_bytes": 17.96,
    "any.launch_s": 0.0007528,
    "any.launch_backward": 1.601,
    "any.launch_sync": 0.1411,
    "any.tp_overlap": 0.2448,
    "any.dp_overlap": 0.8645,
    "any.gather_overlap": 0.6138,
    "any.contention": 1.001,
    "any.optimizer_bytes": 34.52,
    "any.step_s": 0.01188,
    "any.cast_bytes": 18.2,
    "any.fine_cast": 2.011,
    "any.token_bytes": 15.05,
    "any.grouped": 1.033,
    "any.router_s": 0.001874,
    "any.ep_overlap": 0.637,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.7228,
    "ampere.gemm_half": 675.6,
    "ampere.attention": 0.506,
    "ampere.portable_attention": 0.4331,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.6656,
    "hopper.gemm_half": 716.7,
    "hopper.attention": 0.4329,
    "hopper.portable_attention": 0.3718,
    "hopper.gemm8": 0.6216,
    "hopper.portable_gemm": 0.8043,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.606,
    "blackwell.gemm_half": 677.8,
    "blackwell.attention": 0.4843,
    "blackwell.portable_attention": 0.4099,
    "blackwell.gemm8": 0.5553,
    "blackwell.gemm4": 0.4474,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 16.12,
    "eager.launch_s": 0.0009698,
    "eager.gemm": 0.9848,
    "eager.dp_overlap": 0.8577,
    "eager.tp_overlap": 0.15,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 17.26,
    "compiled.launch_s": 0.0007528,
    "compiled.gemm": 0.9462,
    "compiled.dp_overlap": 0.8899,
    "compiled.tp_overlap": 0.2732,
    "compiled.cast_bytes": 18.2,
    "compiled.gemm8": 1.078,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 14.94,
    "megatron-core.launch_s": 0.0007528,
    "megatron-core.gemm": 0.9884,
    "megatron-core.dp_overlap": 0.9359,
    "megatron-core.tp_overlap": 0.2797,
    "megatron-core.cast_bytes": 11.73,
    "megatron-core.gemm8": 1.028,
    "megatron-core.kept_logit": 6.13,
    "megatron-core.constant_bytes": 1.013e08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 12.91,
    "megatron-2020.launch_s": 0.0008328,
    "megatron-2020.gemm": 1.101,
    "megatron-2020.score_bytes": 1e-09,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.6039,
    "blackwell-ultra.gemm8": 0.5839,
    "blackwell-ultra.gemm4": 0.4575,
    "blackwell-ultra.attention": 0.4987,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.9564,
    "nanotron.hidden_bytes": 15.95,
    "nanotron.launch_s": 0.001062,
    "nanotron.tp_overlap": 0.1114,
    "nanotron.dp_overlap": 0.8624,
    "nanotron.launch_sync": 0.6111,
    "nanotron.listed": 4.6,
    "nanotron.launch_backward": 1.895,
    "nanotron.gather_overlap": 0.589,
    "nanotron.logit_bytes": 21.29,
    "nanotron.kept_whole": 1.141,
    "nanotron.idle_bytes": 2.24,
    "nanotron.kept_hidden": 12.97,
    "nanotron.kept_qkv": 1.198,
    "nanotron.kept_ffn": 1.368,
    "nanotron.kept_logit": 9.972,
    "nanotron.fragments": 0.06186,
    "nanotron.constant_bytes": 1.031e08,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.099,
    "llm-foundry.hidden_bytes": 15.96,
    "llm-foundry.launch_s": 0.0009698,
    "llm-foundry.tp_overlap": 0.15,
    "llm-foundry.dp_overlap": 0.8487,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.101,
    "torchtitan-compiled.hidden_bytes": 17.22,
    "torchtitan-compiled.launch_s": 0.0007528,
    "torchtitan-compiled.tp_overlap": 0.2901,
    "torchtitan-compiled.dp_overlap": 0.8899,
    "torchtitan-compiled.cast_bytes": 19.65,
    "torchtitan-compiled.gemm8": 1.028,
    "torchtitan-compiled.kept_hidden": 3.678,
    "torchtitan-compiled.kept_qkv": 0.4164,
    "torchtitan-compiled.kept_ffn": 0.4179,
    "torchtitan-compiled.kept_logit": 13.31,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 0.8777,
    "torchtitan-eager.hidden_bytes": 16.34,
    "torchtitan-eager.launch_s": 0.0009698,
    "torchtitan-eager.cast_bytes": 57.46,
    "torchtitan-eager.kept_hidden": 4.51,
    "torchtitan-eager.kept_ffn": 0.7016,
    "torchtitan-eager.kept_logit": 6.068,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.8608,
    "maxtext.hidden_bytes": 17.17,
    "maxtext.launch_s": 0.0007528,
    "maxtext.tp_overlap": 0.2732,
    "maxtext.dp_overlap": 0.8692,
    "maxtext.contention": 1.0,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.7892,
    "pax.hidden_bytes": 17.57,
    "pax.launch_s": 0.0007528,
    "pax.tp_overlap": 0.2732,
    "pax.dp_overlap": 0.9181,
    "pax.cast_bytes": 23.53,
    "pax.gemm8": 1.031,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.7454,
    "simumax-b200.hidden_bytes": 15,
    "simumax-b200.launch_s": 0.0007528,
    "simumax-b200.tp_overlap": 0.1889,
    "simumax-b200.dp_overlap": 0.9352,
    "simumax-b200.kept_logit": 10.01,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 1.174,
    "nemo-24.11.hidden_bytes": 14.8,
    "nemo-24.11.launch_s": 0.0007528,
    "nemo-24.11.tp_overlap": 0.3394,
    "nemo-24.11.dp_overlap": 0.9384,
    "nemo-24.11.token_bytes": 15.21,
    "nemo-24.11.router_s": 0.001965,
    "nemo-24.11.ep_overlap": 0.6746,
    "nemo-24.11.cast_bytes": 10.45,
    "nemo-24.11.gemm8": 1.013,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.126,
    "megatron-2021.hidden_bytes": 11.6,
    "megatron-2021.launch_s": 0.0008637,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 1.031,
    "megatron-bridge-25.09.hidden_bytes": 14.76,
    "megatron-bridge-25.09.launch_s": 0.0007528,
    "megatron-bridge-25.09.tp_overlap": 0.3406,
    "megatron-bridge-25.09.dp_overlap": 0.9358,
    "megatron-bridge-25.09.cast_bytes": 8.491,
    "megatron-bridge-25.09.gemm8": 1.073,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 1,
    "nemo-24.03.hidden_bytes": 15.13,
    "nemo-24.03.launch_s": 0.0007528,
    # megatron-2022: vtrain
    "megatron-2022.gemm": 1.146,
    "megatron-2022.hidden_bytes": 11.38,
    "megatron-2022.launch_s": 0.0008957,
    "megatron-2022.launch_sync": 0.2492,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.9451,
    "megatron-deepspeed-2022.hidden_bytes": 11.83,
    "megatron-deepspeed-2022.launch_s": 0.0008637,
    "megatron-deepspeed-2022.kept_bytes": 7.754,
    "megatron-deepspeed-2022.kept_hidden": 9.136,
    "megatron-deepspeed-2022.context_bytes": 2.908e09,
    "megatron-deepspeed-2022.kept_logit": 4.872,
    "megatron-deepspeed-2022.fragments": 0.05644,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 1.03,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.098,
    "megatron-bridge-26.04.token_bytes": 15.73,
    "megatron-bridge-26.04.router_s": 0.00171,
    "megatron-bridge-26.04.ep_overlap": 0.7426,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.104,
    "megatron-bridge-26.06.token_bytes": 12.56,
    "megatron-bridge-26.06.router_s": 0.001079,
    "megatron-bridge-26.06.ep_overlap": 0.7426,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 10.44,
    "megatron-bridge-26.06.01.router_s": 0.0007165,
    "megatron-bridge-26.06.01.ep_overlap": 0.7791,
    # megatron-core-unfused: Megatron's own tests
    "megatron-core-unfused.kept_score": 4.834,
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
