"""The command line: one file a command, shared options in `options.py`, exit codes and output in `terminal.py`."""
