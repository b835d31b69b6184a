"""MaxText's YAML: which key is which field (keys.py), and a plan as that file (write.py)."""
