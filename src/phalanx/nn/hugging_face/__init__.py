"""Hugging Face weights, read and written: names.py maps tensor names, container.py moves bytes, files.py joins
both."""
