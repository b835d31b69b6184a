"""An examination of this machine's GPUs (`python -m benchmarks.gpu`): each part runs in its own process. Our
step next to plain PyTorch, operations compared with fp64, parity, generation; and steps on a fake GPU."""
