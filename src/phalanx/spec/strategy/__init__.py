"""The strategy: its fields (spec.py, read it first), what is legal (legality.py), the mesh of ranks (mesh.py), and
what each rank holds of a layer (split.py).
"""
