"""Valid files of clusters and loads: topologies, free GPUs, traces, observations, serving plans, metrics."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from phalanx.schedule.event import Event
from phalanx.schedule.observation import (
    BackwardStart,
    Holder,
    KeptStorage,
    Observation,
    ObservedEvent,
    RankObservation,
    Site,
    Synchronisation,
    TrainedParameters,
)
from phalanx.schedule.observation_file import to_json
from phalanx.serving import plan_file as serving
from phalanx.spec.model.families import complete
from phalanx.spec.model.presets import preset
from phalanx.spec.model.spec import ModelSpec

TOPOLOGY = b"""# two leaves
SwitchName=leaf0 Nodes=node[0-1]
SwitchName=leaf1 Nodes=node[2-3] LinkSpeed=400
SwitchName=spine Switches=leaf[0-1]
"""
FREE: Any = {
    "free": {"node0": "0-7", "node[1-2]": "0,2-3", "node3": [5, 6]},
    "nodes": "node[0-3]",
    "leaves": {"leaf0": "node[0-1]", "leaf1": "node[2-3]"},
    "oversubscription": 2,
}
IBNETDISCOVER = b"""# Topology file: generated on Mon Nov 2
Switch  24 "S-005442ba00003080"      # "SW-A" base port 0 lid 6 lmc 0
[22]    "H-0008f10403961354"[1](8f10403961355)    # "node01 HCA-1" lid 4 4xHDR
[21]    "H-0008f10403961454"[1](8f10403961455)    # "node02 HCA-1" lid 5 4xHDR
[10]    "S-0008f10400410015"[1]      # "SW-B" lid 3 4xHDR

Switch  24 "S-0008f10400410015"      # "SW-B" base port 0 lid 3 lmc 0
[1]    "H-0008f10403961554"[1](8f10403961555)    # "node03 HCA-1" lid 9 4xHDR
[2]    "S-005442ba00003080"[10]      # "SW-A" lid 6 4xHDR
"""
TOPO = b"""\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity
GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-47
GPU1\tNV18\t X \tNV18\tNV18\tPXB\t0-47
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t48-95
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t48-95
NIC0\tPIX\tPXB\tSYS\tSYS\t X
"""
SCONTROL = b"SwitchName=s Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=r[1-2]\n" + b"".join(
    b"SwitchName=r%d Level=0 LinkSpeed=1 Nodes=n[%d-%d]\n" % (n, 2 * n - 1, 2 * n) for n in (1, 2)
)
TREE_YAML = (
    b"- topology: a\n  cluster_default: true\n  tree:\n    switches:\n"
    b"      - {switch: s, children: 'r[1-2]'}\n      - {switch: r1, nodes: 'n[1-2]'}\n"
    b"      - {switch: r2, nodes: n3}\n"
)
NCCL_XML = (
    b'<system version="1"><cpu numaid="0"><pci busid="0:1"><pci busid="0:2"><gpu dev="0">'
    b'<nvlink target="0:4" count="4"/></gpu></pci><pci busid="0:3"><nic>'
    b'<net name="mlx5_0" speed="400000"/></nic></pci></pci><pci busid="0:4">'
    b'<gpu dev="1"><nvlink target="0:2" count="4"/></gpu></pci></cpu></system>\n'
)
ROCM = (
    b"GPU[0]\t: (Topology) Numa Node: 0\nGPU[1]\t: (Topology) Numa Node: 1\n== Link Type between two GPUs ==\n"
    b"       GPU0   GPU1\nGPU0   0      XGMI\nGPU1   XGMI   0\n== Numa Nodes ==\n"
)
JOBS = b"submit,gpus,duration,limit,widths\n0,8,3600,7200,2:0.3;4:0.55\n60,4,1800,,\n120,16,600,1200,8:0.6\n"
REQUESTS = b"arrival,input,output,priority,reused\n" + b"".join(
    b"%d.5,%d,%d,%d,%d\n" % (2 * i, 300 + 50 * (i % 7), 20 + 3 * (i % 5), i % 2, 10 * (i % 3)) for i in range(60)
)
SERVED = (
    b"id,framework,gpu,model,mode,isl,osl,concurrency,ttft_ms,tpot_ms,tp,num_gpus,precision\n"
    b"a,vllm,H100,llama3-70b,aggregated,1000,1000,16,180,14.2,8,8,fp8\n"
    b"b,sglang,H200,llama3-70b,aggregated,8000,1000,4,900,11.5,8,8,fp8\n"
)
METRICS = b"".join(
    json.dumps(
        {
            "step": step,
            "loss": 5.0 - step,
            "step_time_s": 0.1,
            "tokens_per_s": 2560.0,
            "mem_bytes": 10**6,
            "expert_tokens": {"0": [3, 5, 4, 4], "1": [8, 0, 4, 4]},
            "expert_dropped": 0.01 * step,
        }
    ).encode()
    + b"\n"
    for step in range(1, 4)
)
TIMELINE: Any = {
    "traceEvents": [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}},
        *(
            {
                "name": name,
                "ph": "X",
                "ts": 10.0 * i,
                "dur": 8.0,
                "pid": 0,
                "tid": 0,
                "cat": kind,
                "args": {"op": name},
            }
            for i, (name, kind) in enumerate(
                [("forward", "compute"), ("backward", "compute"), ("all_reduce", "comm")]
            )
        ),
    ]
}
RECORD: Any = {"step_time_s": 0.1, "memory_bytes": 10**6, "timeline": {"exposed_communication_s": 0.01}, "events": []}
PROGRAM = b"""import torch

layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    layer(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@cache
def observation() -> Any:
    """The JSON of an observed program of 8 ranks."""
    site, everyone = Site("train.py", 12, "step"), tuple(range(8))
    reduce = Event("collective", "all_reduce", "B", "blocks.0", "dp", 8, None, "float32", bytes=4 * 10**6)
    send = Event("p2p", "send", "F", "blocks.0", "pp", 2, 1, "bfloat16", bytes=2**20)
    work = Event("compute", "forward", "F", "blocks.0", flops=10**12, alloc=2**20, free=2**19)
    rank = RankObservation(
        rank=0,
        count=8,
        are="all ranks",
        step=2,
        events=tuple(ObservedEvent(e, "blocks.0", site, everyone, e.op) for e in (work, send, reduce, reduce)),
        flops={("F", "blocks.0"): 10**12, ("B", "blocks.0"): 2 * 10**12},
        start={"parameter": 2**22, "optimizer": 2**23},
        peak=2**30,
        peak_phase="B",
        peak_module="blocks.0",
        holders=(Holder("activation", "blocks.0", 2**29),),
        host_peak=0,
        synchronisations=(Synchronisation("item", "B", "", site, 2),),
        micro_batches=1,
        optimizers=("AdamW",),
        flops_by_type={"bfloat16": 3 * 10**12},
        trained=(TrainedParameters("blocks.0", 10**6, 10**6, "float32"),),
        kept=(KeptStorage("blocks.0", site, 2**10),),
        backward_starts=(BackwardStart("B", (0,), (Holder("activations", "blocks.0", 2**28),)),),
    )
    return json.loads(json.dumps(to_json(Observation("train.py", 8, {"dp": 8}, "cuda", "2.13", (rank,)))))


@cache
def serving_plan() -> Any:
    """The JSON of a serving plan."""
    workers = serving.Workers("both", 2, 4, 1, 1, 4, 1, 64, 8192, 200_000)
    plan = serving.ServingPlan(
        model_name="llama3-8b",
        model=ModelSpec(**complete(preset("llama3-8b"))),
        cluster="dgx-h100",
        node_gpus=8,
        gpus=8,
        engine="vllm",
        weights="bf16",
        cache="bf16",
        page_tokens=16,
        longest=2000,
        draft_tokens=0,
        adapters=0,
        workers=(workers,),
        load=serving.ServedLoad(1000, 1000, 16, 0.0, "", 0.0),
        limits=serving.LatencyLimits(1.0, 0.03, 99),
        prediction={},
    )
    apart = (replace(workers, role="prefill", count=1), replace(workers, role="decode", count=1))
    content = {"version": serving.VERSION, "kind": "serving"}
    return [
        json.loads(json.dumps(content | asdict(p)))
        for p in (plan, replace(plan, engine="sglang", workers=apart), replace(plan, engine="trtllm"))
    ]
