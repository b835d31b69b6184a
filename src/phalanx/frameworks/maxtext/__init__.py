"""MaxText's YAML: what it can do, read and written."""
