"""Pictures of one style: described as data (figure.py), and drawn as SVG, 80 columns of text, a page or PNG."""
