"""The model: its shape and its list of parameters (spec.py, read it first), families, presets, and Hugging Face
configs.
"""
