"""The time of a collective, by four models: measured.py (fits of a measured machine, else a ring on link.py),
nccl_model.py (NCCL on described links), critical_path.py (a message schedule, step by step) and closed_form.py (the
published α-β-γ formulas).
"""
