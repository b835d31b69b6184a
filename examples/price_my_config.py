"""What a training that runs already costs on a cluster, what is wrong with it, and what would be faster.

python examples/price_my_config.py [run.sh]     of Megatron-LM, torchtitan, DeepSpeed, accelerate, nanotron, ...
"""

import sys
from pathlib import Path

import phalanx

SCRIPT = """torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 --swiglu \\
  --normalization RMSNorm --disable-bias-linear --seq-length 8192 --max-position-embeddings 8192 \\
  --vocab-size 128256 --micro-batch-size 1 --global-batch-size 128 --tensor-model-parallel-size 8 --bf16 \\
  --recompute-granularity full
"""

file = Path(sys.argv[1] if len(sys.argv) > 1 else "run.sh")
if not file.exists():
    file.write_text(SCRIPT)

for finding in phalanx.lint(file, cluster="dgx-h100").findings:
    print(f"{finding.name}: {finding.problem}; {finding.remedy}")
now = phalanx.predict(file, cluster="dgx-h100")
print(f"now {now.strategy}: {now.step_time_s:.2f} s a step, {now.memory_bytes / 2**30:.1f} GiB a GPU")
question = now.question
better = phalanx.plan(
    model="llama3-8b",
    cluster="dgx-h100",
    gpus=question.gpus,
    batch=question.global_batch,
    seq=question.seq,
    stack=question.stack,
)
print(f"better {better.strategy}: {better.best.step_time_s:.2f} s a step")
