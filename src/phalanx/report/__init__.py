"""What people see: results of other rooms as terminal tables, charts and SVG. Read style.py first. No torch."""
