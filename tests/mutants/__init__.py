"""Lines of src that are broken on purpose, one at a time, and whether a test notices (__main__.py)."""
