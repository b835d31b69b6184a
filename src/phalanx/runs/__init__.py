"""The folder of a run (folder.py, read first): what it starts from, and how it is resumed."""
