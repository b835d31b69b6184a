"""Tables of numbers that the command line prints: table.py holds their form, every other file one kind of table."""
