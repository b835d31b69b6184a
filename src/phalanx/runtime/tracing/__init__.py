"""What a running step records of itself: live tensors by module, times of passes, values that the host reads."""
