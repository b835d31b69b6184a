"""Hugging Face weights, in and out: names.py says what is where, container.py moves the bytes, files.py does both."""
