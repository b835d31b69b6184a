"""The lab: several hosts with links of a set rate, simulated on one machine (`python -m benchmarks.lab`)."""
