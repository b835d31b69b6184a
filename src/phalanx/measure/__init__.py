"""What this machine can do: alpha, beta and kernel rates, measured."""
