"""What each command does, a file each, composed from the other rooms; `phalanx.cli` parses and prints around it."""
