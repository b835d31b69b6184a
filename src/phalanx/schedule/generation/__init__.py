"""Which tokens a model computes in a step of generation: requests, batches of their tokens, pages of the KV cache."""
