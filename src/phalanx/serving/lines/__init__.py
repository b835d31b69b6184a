"""Command lines of serving engines and of their benchmarks, read as a question; nothing of them is run."""
