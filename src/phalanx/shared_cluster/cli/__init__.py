"""The commands `phalanx cluster place` and `phalanx cluster`."""
