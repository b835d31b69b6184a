"""Instruments of a running step: live bytes and FLOPs by unit, times of passes, and values that the host reads.

Read instrument.py first: the step in which every operation is seen. timelines.py is cheap and serves
any step; host_values.py is the one place where a step reads the content of a tensor.
"""
