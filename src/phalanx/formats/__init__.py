"""Files of other programs, read and written: one program a file."""
