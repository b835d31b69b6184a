"""The config.json of each family of `transformers`: its reader and its writer."""
