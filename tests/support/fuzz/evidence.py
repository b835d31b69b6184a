"""Valid files of what was measured and what is asked again: logs, traces, snapshots, calibrations, failures, checks;
and calls of tools."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hypothesis import strategies as st

from phalanx.cli.agents import tool_calls
from support.fuzz import configurations, files

ASKED = "--model llama2-7b --cluster dgx-h100 --gpus 4 --batch 4 --seq 2048 --strategy tp=2,sp=1,zero=1"
LOG = configurations.LOG + b"".join(
    b" [2025-08-01 07:19:5%d] iteration %8d/    5000 | consumed samples: %d | elapsed time per iteration "
    b"(ms): %d.3 | throughput per GPU (TFLOP/s/GPU): 412.5 | "
    b"global batch size:    64 | lm loss: 9.04E+00 | grad norm: 1.2 |\n" % (step, step, 64 * step, 4400 + step)
    for step in range(1, 8)
)
TITAN = b"".join(
    b"[titan] 2025-08-01 07:19:5%d,123 - root - INFO - step: %2d  loss: 12.2  memory: 41.12GiB(51.9%%)  tps: %d  "
    b"tflops: 301.2  mfu: 30.5%%\n" % (step, step, 6000 + step)
    for step in range(1, 8)
)
NCCL_LOG = (
    b"a:1:2 [0] NCCL INFO comm 0x55 rank 0 nRanks 24 nNodes 3 localRanks 8 localRank 0 MNNVL 0\n"
    b"a:1:2 [0] NCCL INFO Channel 00/0 : 9[51000] -> 0[4b000] [receive] via NET/Socket/0\n"
    b"a:1:2 [0] NCCL INFO Channel 00/0 : 0[4b000] -> 7[cf000] via P2P/IPC/read\n"
)
INSPECTOR = b"".join(
    json.dumps(
        {
            "header": {"rank": 0, "n_ranks": 4, "nnodes": 1},
            "coll_perf": {"coll": "AllReduce", "coll_sn": i, "coll_msg_size_bytes": 2**30, "coll_exec_time_us": 9000},
        }
    ).encode()
    + b"\n"
    for i in range(3)
)
CALIBRATION: Any = {
    "calibration": {
        **{"products": 1.2, "attention": 1.1, "memory": 1.05, "inside": 1.2, "between": 1.3, "host": 0.9},
        **{"stack": "megatron-core", "steps": 3, "off": 25.7, "remains": 2.1},
    }
}
STEPS = b"step,measured\ntp=4,0.9\ntp=2,1.1\n"
FAILURES = b"hours,component\n10,gpu\n30.5,software\n90,gpu\n100,end\n"
LENGTHS = b"".join(b"%d\n" % (100 + 37 * i % 4000) for i in range(60))
CHECKS: Any = {
    "checks": {
        "fits": {"ask": f"predict {ASKED}", "assert": "memory<75GiB, step<20s, fits"},
        "clean": {"ask": "lint fsdp.yaml --gpus 16"},
        "days": {"ask": f"simulate goodput {ASKED} --days 3 --trials 20", "assert": "days<4"},
    }
}
_MIB = 2**20
_FRAMES = [{"filename": "train.py", "line": 12, "name": "forward"}]
SNAPSHOT: Any = {
    "segments": [
        {
            **{"device": 0, "address": 0, "total_size": 20 * _MIB, "segment_pool_id": [0, 0]},
            "blocks": [
                {"size": 2 * _MIB, "address": 0, "state": "active_allocated", "frames": _FRAMES},
                {"size": 18 * _MIB, "address": 2 * _MIB, "state": "inactive"},
            ],
        }
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": 0, "size": 20 * _MIB},
            {"action": "alloc", "addr": 0, "size": 2 * _MIB, "frames": _FRAMES},
            {"action": "free_completed", "addr": 0, "size": 2 * _MIB},
            {"action": "oom", "size": 99 * _MIB, "device_free": 0},
        ]
    ],
    "allocator_settings": {"max_split_size": -1},
}


@cache
def trace() -> Any:
    """Two steps of a rank as Kineto writes them."""
    events: list[Any] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        *(
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "pid": 1, "tid": 1, "ts": 1e5 * n}
            | {"dur": 9e4, "args": {}}
            for n in (1, 2)
        ),
    ]
    for step in (1, 2):
        at = 1e5 * step
        for name, long, args in (
            ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", 4e4, {}),
            ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)", 1e4, {}),
            (
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
                2e4,
                {"Collective name": "allreduce", "In msg nelems": 2**20, "dtype": "BFloat16", "Group size": 2}
                | {"Process Group Ranks": "[0, 1]", "Process Group Name": "tp"},
            ),
        ):
            more = {"stream": 7, "device": 0, "correlation": len(events)}
            events.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": name,
                    "pid": 0,
                    "tid": 7,
                    "ts": at,
                    "dur": long,
                    "args": args | more,
                }
            )
            at += long + 1e3
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85 * 10**9}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 4},
        "traceEvents": events,
    }


_POINT = {"model": "llama2-7b", "cluster": "dgx-h100", "gpus": 16, "batch": 64, "seq": 2048}
CALLS: tuple[tuple[str, Any], ...] = (
    (
        "predict",
        _POINT | {"strategy": "tp=4,zero=1", "rates": "price=2.5,grid=SWE", "lengths": "lognormal:500,1+packed"},
    ),
    ("predict", {"source": ["run.sh"], "cluster": "dgx-h100", "stack": "megatron-core", "precision": "bf16"}),
    (
        "explain",
        _POINT | {"strategy": "tp=4,pp=2,zero=1", "changes": ["model.layers=8"], "options": "first_moment=bfloat16"},
    ),
    ("lint", {"source": ["fsdp.yaml"], "gpus": 16}),
    ("read", {"paths": ["run.sh"], "gpus": 16}),
    ("compare", {"sides": ["tp=4", "run.sh"], **_POINT}),
    ("memory", _POINT | {"strategy": "tp=4,zero=1"}),
    ("communication", _POINT | {"strategy": "tp=4,zero=1"}),
    ("state", {"params": "7B", "card": 80}),
    ("bubble", {"ranks": 4, "micro_batches": 8, "costs": "1,1,1"}),
    ("kv_cache", {"model": "llama2-7b", "weights": "fp8"}),
    ("goodput", _POINT | {"strategy": "tp=4,zero=1", "days": 3, "trials": 20, "mttf": "12h"}),
    ("models", {"name": "llama3-8b"}),
    ("clusters", {"name": "dgx-h100", "nodes": 2}),
)
"""Calls of tools for agents, most of them right."""


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, ...]:
    """Draw a call of a tool with mistakes, as the words of a case (see `call`)."""
    name, arguments = draw(st.sampled_from(CALLS))
    text = files.as_json(draw(files.mistaken(arguments))).decode(errors="replace")
    return (tool_calls.TOOLS[name].words[0], "--json", name, text.replace("\0", ""))


def call(words: list[str], command: Any) -> None:
    """Run a case's call of a tool as the server for agents does: JSON that it refuses is the client's to mend."""
    from phalanx.cli.terminal import announce
    from phalanx.spec.errors import InputError

    *_, name, text = words
    try:
        arguments = json.loads(text)
        if not isinstance(arguments, dict):
            raise InputError("arguments", text[:20], "are no object")
        line = tool_calls.words_of(tool_calls.TOOLS[name], arguments)
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, InputError) else InputError("arguments", text[:20], "are no JSON")
        announce(f"error: {reason}")
        raise SystemExit(2) from None
    command(line)
