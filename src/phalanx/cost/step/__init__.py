"""The exact engine: the price of our own runtime's step on a measured machine, event by event.

Read term.py and terms.py first (a step as a sum of terms), then predict.py (time and memory from the terms; with a
pipeline predict_pipeline.py) and expand.py (the same terms as the ordered events that `verify` compares).
"""
