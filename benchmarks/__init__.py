"""Benchmarks of what the project promises in seconds and ratios: `make bench`, or `python -m benchmarks NAME ...`."""
