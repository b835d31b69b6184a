"""Fake hardware for a step that is observed: tensors without content, a GPU, and a world of absent ranks."""
