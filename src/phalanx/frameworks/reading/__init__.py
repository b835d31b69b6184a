"""Other people's files: found, parsed and taken as tables that a framework reads."""
