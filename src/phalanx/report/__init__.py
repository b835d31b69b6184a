"""What people see: terminal tables, charts and SVG files of the results of other rooms. Read style.py first. No
torch."""
