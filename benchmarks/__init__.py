"""What the project promises in seconds and ratios, measured: `make bench`, or `python -m benchmarks NAME ...`."""
