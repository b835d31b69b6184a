"""Text generation under every split: one rank's part of a model with its KV cache in pages (replica.py),
the loop of steps (generate.py), sampling, texts (text.py), and local ranks (worker.py)."""
