"""The strategy: its fields (spec.py, read it first), what is legal (legality.py), the mesh of ranks (mesh.py), and
each rank's part of a layer (split.py).
"""
