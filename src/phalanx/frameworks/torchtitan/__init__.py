"""torchtitan's configuration in TOML, YAML and Python: what it can do, read and written."""
