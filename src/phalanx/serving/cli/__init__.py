"""The commands `phalanx serve ...`."""
