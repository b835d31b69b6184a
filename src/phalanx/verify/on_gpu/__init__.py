"""What `phalanx doctor --gpu` runs on a GPU, each in its own process: our step beside plain PyTorch; and the step
on an imagined GPU, which needs none."""
