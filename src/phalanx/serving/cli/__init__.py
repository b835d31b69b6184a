"""The command `phalanx serve plan`, and the tables of decoding."""
