"""Pictures of one style: what is drawn as data (figure.py), as SVG, as 80 columns of text, as a page or PNG."""
