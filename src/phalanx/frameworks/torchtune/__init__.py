"""torchtune: recipes of fine-tuning, each under its YAML."""
