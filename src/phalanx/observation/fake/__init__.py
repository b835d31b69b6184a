"""What stands in for hardware while a step is observed: tensors without content, a GPU, peers that never answer."""
