"""What was run and measured: pages of runs, diagnoses, proofs, machines."""
