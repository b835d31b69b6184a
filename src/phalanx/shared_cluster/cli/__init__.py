"""The commands `phalanx cluster ...`."""
