"""Tables of numbers that the command line prints: table.py defines a table, every other file has one kind of them."""
