"""The commands `phalanx learn cases`, `draw` and `quiz`."""
