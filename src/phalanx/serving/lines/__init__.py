"""Command lines of serving engines and of their benchmarks, read as a question; none of them is run."""
