"""Recorded steps of any program: what ran on each rank and when, from the files of profilers, and what NCCL and the
allocator wrote. Read rank_trace.py first, then breakdown.py.
"""
