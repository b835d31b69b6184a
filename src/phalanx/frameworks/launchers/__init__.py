"""What starts train.sh once on every node: one launcher a file, all in registry.py."""
