"""Prove that the program does what the plan says, on this machine, before 64 GPUs are paid for. Needs torch.

python examples/verify_before_you_pay.py
"""

import phalanx

question = phalanx.Query(
    model="gpt2", cluster="dgx-h100", gpus=64, batch=128, seq=1024, strategy="dp=8,tp=4,sp=1,pp=2,zero=1"
)
predicted = phalanx.predict(question, stack="phalanx")
proof = phalanx.verify(question)
print(f"predicted: {predicted.step_time_s * 1e3:.0f} ms a step, {predicted.memory_bytes / 2**30:.2f} GiB a GPU")
for ranks in proof.classes:
    print(f"{ranks.ranks.count} ranks like rank {ranks.ranks.rank}: {'proved' if ranks.proved else 'NOT proved'}")
assert proof.proved, [str(d) for ranks in proof.classes for d in ranks.differences]
