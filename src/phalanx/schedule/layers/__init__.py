"""What layers send within a pass: collectives in order (read collectives.py first), context parallelism, routing of
tokens to experts, tensor parallelism, the slices of the head."""
