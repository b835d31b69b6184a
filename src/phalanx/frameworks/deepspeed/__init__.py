"""DeepSpeed's JSON: which key is which field (keys.py), and a plan as that file and a script (write.py)."""
