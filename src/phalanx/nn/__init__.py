"""The decoder family in torch (decoder.py, read first), its initial weights (init.py) and Hugging Face weights
(hugging_face/)."""
