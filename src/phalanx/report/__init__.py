"""Answers as terminal tables, charts, SVG and HTML. Read style.py first. No torch."""
