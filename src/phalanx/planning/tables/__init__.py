"""Tables of numbers that the command line prints: table.py has their form, every other file one kind of table."""
