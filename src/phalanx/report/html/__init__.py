"""Reports as one HTML file each: page.py puts sections into the page, the other files make the sections of a plan, a
comparison, a proof, a run."""
