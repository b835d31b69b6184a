"""Text generation under every split: the KV cache in pages (kv_cache.py), one rank's part of a model (replica.py),
the loop of steps (generate.py), sampling, texts (text.py), and local ranks (worker.py)."""
