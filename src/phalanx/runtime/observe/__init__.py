"""What can be seen of a running step: FLOPs and live bytes, the times of its passes, and its timeline as a file.

Read instrument.py first: the step in which every operation is observed. pass_times.py and perfetto.py are cheap and
serve any step; host_values.py is the one place where a step reads the content of a tensor.
"""
