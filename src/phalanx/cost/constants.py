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
    "nvidia.gemm": 0.8048,
    "nvidia.gemm8": 0.5894,
    "nvidia.gemm_half": 407.8,
    "nvidia.attention": 0.5864,
    "nvidia.attention_half": 449.7,
    "nvidia.memory": 0.799,
    "nvidia.portable_attention": 0.4079,
    "nvidia.attention_backward": 0.824,
    "nvidia.portable_backward": 0.7717,
    "nvidia.attention_narrow": 0.1842,
    # H100-500W: torchtitan, torchao
    "H100-500W.clock": 0.8941,
    # GB200: nemo-megatron-bridge, against B200
    "GB200.clock": 0.9556,
    # GB300: nemo-megatron-bridge, against B300
    "GB300.clock": 1.09,
    # any: all families
    "any.hidden_bytes": 17.94,
    "any.ffn_bytes": 6.596,
    "any.backward_traffic": 1.544,
    "any.logit_bytes": 19.02,
    "any.launch_s": 3.238e-05,
    "any.launch_backward": 1.642,
    "any.launch_sync": 0.07649,
    "any.tp_overlap": 0.4255,
    "any.dp_overlap": 0.7237,
    "any.gather_overlap": 0.5988,
    "any.contention": 1.005,
    "any.ring_bytes": 19.59,
    "any.optimizer_bytes": 30.02,
    "any.step_s": 0.01054,
    "any.cast_bytes": 9.367,
    "any.fine_cast": 2.127,
    "any.token_bytes": 13.32,
    "any.grouped": 1.109,
    "any.router_s": 0.002442,
    "any.ep_overlap": 0.5985,
    # ampere: vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100
    "ampere.gemm": 0.7412,
    "ampere.gemm_half": 582.1,
    "ampere.attention": 0.5858,
    "ampere.portable_attention": 0.5045,
    # hopper: nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100
    "hopper.gemm": 0.696,
    "hopper.gemm_half": 489.7,
    "hopper.attention": 0.6019,
    "hopper.portable_attention": 0.3003,
    "hopper.gemm8": 0.6152,
    "hopper.portable_gemm": 0.7806,
    # blackwell: simumax-b200, nemo-megatron-bridge on B200 and GB200
    "blackwell.gemm": 0.6027,
    "blackwell.gemm_half": 457.2,
    "blackwell.attention": 0.557,
    "blackwell.portable_attention": 0.4079,
    "blackwell.gemm8": 0.5436,
    "blackwell.gemm4": 0.4048,
    # eager: hf-ultrascale, llm-foundry, torchtitan without compiling
    "eager.hidden_bytes": 15.9,
    "eager.launch_s": 3.228e-05,
    "eager.gemm": 1.003,
    "eager.dp_overlap": 0.5589,
    "eager.tp_overlap": 0.4064,
    # compiled: torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking
    "compiled.hidden_bytes": 17.87,
    "compiled.launch_s": 3.273e-05,
    "compiled.gemm": 0.9892,
    "compiled.dp_overlap": 0.4626,
    "compiled.tp_overlap": 0.3692,
    "compiled.cast_bytes": 14.37,
    "compiled.gemm8": 1.102,
    # megatron-core: nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests
    "megatron-core.hidden_bytes": 17.43,
    "megatron-core.launch_s": 3.668e-05,
    "megatron-core.gemm": 0.9822,
    "megatron-core.dp_overlap": 0.8951,
    "megatron-core.tp_overlap": 0.5847,
    "megatron-core.pp_overlap": 0.5107,
    "megatron-core.cast_bytes": 7.87,
    "megatron-core.gemm8": 1.003,
    "megatron-core.kept_logit": 5.941,
    "megatron-core.constant_bytes": 1.143e+08,
    # megatron-2020: vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom
    "megatron-2020.hidden_bytes": 16,
    "megatron-2020.launch_s": 3.214e-05,
    "megatron-2020.gemm": 1.013,
    "megatron-2020.score_bytes": 9.966e-10,
    # blackwell-ultra: nemo-megatron-bridge on B300 and GB300
    "blackwell-ultra.gemm": 0.6,
    "blackwell-ultra.gemm8": 0.5643,
    "blackwell-ultra.gemm4": 0.4086,
    "blackwell-ultra.attention": 0.5508,
    # nanotron: hf-ultrascale
    "nanotron.gemm": 0.954,
    "nanotron.hidden_bytes": 16.49,
    "nanotron.launch_s": 3.519e-05,
    "nanotron.tp_overlap": 0.4908,
    "nanotron.dp_overlap": 0.6116,
    "nanotron.launch_sync": 0.1236,
    "nanotron.list_s": 0.000302,
    "nanotron.stalled_s": 0.392,
    "nanotron.launch_backward": 1.8,
    "nanotron.gather_overlap": 0.6528,
    "nanotron.logit_bytes": 26.27,
    "nanotron.kept_hidden": 11.1,
    "nanotron.kept_qkv": 1.126,
    "nanotron.kept_ffn": 1.344,
    "nanotron.kept_logit": 9.133,
    "nanotron.idle_bytes": 1.88,
    "nanotron.fragments": 0.06233,
    "nanotron.constant_bytes": 7.967e+07,
    # llm-foundry: llm-foundry
    "llm-foundry.gemm": 1.076,
    "llm-foundry.hidden_bytes": 14.99,
    "llm-foundry.launch_s": 2.978e-05,
    "llm-foundry.tp_overlap": 0.3411,
    "llm-foundry.dp_overlap": 0.4531,
    "llm-foundry.attention": 0.7896,
    # torchtitan-compiled: torchtitan, torchao
    "torchtitan-compiled.gemm": 1.065,
    "torchtitan-compiled.hidden_bytes": 18.46,
    "torchtitan-compiled.launch_s": 3.553e-05,
    "torchtitan-compiled.tp_overlap": 0.3976,
    "torchtitan-compiled.dp_overlap": 0.4435,
    "torchtitan-compiled.cast_bytes": 20,
    "torchtitan-compiled.gemm8": 1.287,
    "torchtitan-compiled.contention": 1.743,
    "torchtitan-compiled.kept_hidden": 13.55,
    # torchtitan-eager: torchtitan, torchao
    "torchtitan-eager.gemm": 0.9916,
    "torchtitan-eager.hidden_bytes": 15.59,
    "torchtitan-eager.launch_s": 3.08e-05,
    "torchtitan-eager.cast_bytes": 9.693,
    "torchtitan-eager.contention": 2.041,
    "torchtitan-eager.kept_hidden": 18.78,
    # maxtext: MaxText of nvidia-dgxc-benchmarking
    "maxtext.gemm": 0.9712,
    "maxtext.hidden_bytes": 17.86,
    "maxtext.launch_s": 3.265e-05,
    "maxtext.tp_overlap": 0.3694,
    "maxtext.dp_overlap": 0.3498,
    # pax: PAX of nvidia-dgxc-benchmarking
    "pax.gemm": 0.9118,
    "pax.hidden_bytes": 18.07,
    "pax.launch_s": 3.223e-05,
    "pax.tp_overlap": 0.3544,
    "pax.dp_overlap": 0.5096,
    "pax.cast_bytes": 16.74,
    "pax.gemm8": 0.9808,
    # nemo-24.11: NeMo of nvidia-dgxc-benchmarking
    "nemo-24.11.gemm": 1.023,
    "nemo-24.11.hidden_bytes": 17.41,
    "nemo-24.11.launch_s": 3.668e-05,
    "nemo-24.11.tp_overlap": 0.6163,
    "nemo-24.11.dp_overlap": 0.8993,
    "nemo-24.11.token_bytes": 13.13,
    "nemo-24.11.router_s": 0.002364,
    "nemo-24.11.ep_overlap": 0.6353,
    "nemo-24.11.cast_bytes": 7.416,
    "nemo-24.11.gemm8": 0.9941,
    # megatron-2021: megatron-sc21
    "megatron-2021.gemm": 1.045,
    "megatron-2021.hidden_bytes": 15.11,
    "megatron-2021.launch_s": 3.122e-05,
    # megatron-bridge-25.09: nemo-megatron-bridge of release 25.09
    "megatron-bridge-25.09.gemm": 0.9763,
    "megatron-bridge-25.09.hidden_bytes": 17.47,
    "megatron-bridge-25.09.launch_s": 3.668e-05,
    "megatron-bridge-25.09.tp_overlap": 0.6307,
    "megatron-bridge-25.09.dp_overlap": 0.8964,
    "megatron-bridge-25.09.cast_bytes": 7.015,
    "megatron-bridge-25.09.gemm8": 1.015,
    "megatron-bridge-25.09.contention": 1.136,
    # simumax-b200: simumax-b200
    "simumax-b200.gemm": 0.902,
    "simumax-b200.hidden_bytes": 17.41,
    "simumax-b200.launch_s": 5.987e-05,
    # nemo-24.03: nemo-longseq
    "nemo-24.03.gemm": 0.9583,
    "nemo-24.03.hidden_bytes": 17.82,
    "nemo-24.03.launch_s": 3.668e-05,
    "nemo-24.03.attention": 0.6453,
    # megatron-2022: vtrain
    "megatron-2022.gemm": 1.07,
    "megatron-2022.hidden_bytes": 14.18,
    "megatron-2022.launch_s": 3.023e-05,
    "megatron-2022.launch_sync": 0.1269,
    # megatron-deepspeed-2022: bigscience-bloom
    "megatron-deepspeed-2022.gemm": 0.904,
    "megatron-deepspeed-2022.hidden_bytes": 15.77,
    "megatron-deepspeed-2022.launch_s": 3.121e-05,
    "megatron-deepspeed-2022.kept_bytes": 6.937,
    "megatron-deepspeed-2022.whole_bytes": 22.79,
    "megatron-deepspeed-2022.kept_hidden": 10.62,
    "megatron-deepspeed-2022.context_bytes": 3.544e+09,
    "megatron-deepspeed-2022.kept_logit": 6.532,
    "megatron-deepspeed-2022.fragments": 0.06296,
    # nemo-25.04: NeMo 25.04 of nvidia-dgxc-benchmarking
    "nemo-25.04.gemm": 1.076,
    # megatron-bridge-26.02: nemo-megatron-bridge of release 26.02
    "megatron-bridge-26.02.gemm": 0.9896,
    # megatron-bridge-26.04: nemo-megatron-bridge of release 26.04
    "megatron-bridge-26.04.gemm": 1.033,
    "megatron-bridge-26.04.token_bytes": 14.52,
    "megatron-bridge-26.04.router_s": 0.002029,
    "megatron-bridge-26.04.ep_overlap": 0.7106,
    # nemo-25.05: NeMo 25.05 of nvidia-dgxc-benchmarking
    "nemo-25.05.token_bytes": 12.76,
    "nemo-25.05.router_s": 0.0009886,
    "nemo-25.05.ep_overlap": 0.6768,
    # megatron-bridge-26.06: nemo-megatron-bridge of release 26.06
    "megatron-bridge-26.06.gemm": 1.029,
    "megatron-bridge-26.06.token_bytes": 11.96,
    "megatron-bridge-26.06.router_s": 0.001227,
    "megatron-bridge-26.06.ep_overlap": 0.7055,
    # megatron-bridge-26.06.01: nemo-megatron-bridge of release 26.06.01
    "megatron-bridge-26.06.01.token_bytes": 10.3,
    "megatron-bridge-26.06.01.router_s": 0.0008119,
    "megatron-bridge-26.06.01.ep_overlap": 0.7399,
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
