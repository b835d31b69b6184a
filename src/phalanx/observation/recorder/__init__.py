"""Recording a step of any PyTorch program: its collectives, kernels and live tensors, each with where it is from."""
