"""The fastest strategy on a cluster of your own: a preset with other links, and what limits it.

python examples/plan_my_cluster.py
"""

from dataclasses import replace

import phalanx
from phalanx.spec.cluster.presets import preset

hgx = preset("dgx-h100", nodes=8)
inside, between = hgx.tiers
ours = replace(
    hgx,
    name="ours",
    tiers=(inside, replace(between, bandwidth_bytes_per_s_per_gpu_per_direction=25e9, origin="measured")),
)

plan = phalanx.plan(model="llama3-70b", cluster=ours, gpus=64, batch=512, seq=8192)
usual = phalanx.plan(model="llama3-70b", cluster=hgx, gpus=64, batch=512, seq=8192)
print(f"{plan.strategy}: {plan.best.step_time_s:.1f} s a step, MFU {plan.best.mfu:.1%}")
print(f"with 400 Gb/s a GPU: {usual.strategy}: {usual.best.step_time_s:.1f} s")
for rejected in plan.rejected[:3]:
    print(f"not {rejected.strategy}: {rejected.reason}")
plan.save("plan.json")  # for phalanx verify, export and explain
