"""The commands `phalanx cases`, `draw` and `quiz`."""
