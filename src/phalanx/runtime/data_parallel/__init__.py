"""Data parallelism: the engine that reduces gradients in buckets and shards them at ZeRO-1 to 3 (engine.py, read
first), gathered units at ZeRO-3 (zero3.py), and gradient compression (compression/)."""
