"""The cluster: devices, links and measured rates (spec.py, read it first), vendors' presets, and its TOML form."""
