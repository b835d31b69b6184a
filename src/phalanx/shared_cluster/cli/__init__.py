"""The commands `phalanx place` and `phalanx cluster`."""
