"""Published measurements, and how far predictions are from them. No torch.

Read records.py (the rows) and from_row.py (from a row to a prediction's input) first, then prediction_error.py.
"""
