"""Pictures that commands draw with `--save`: a function each, with the numbers that the command prints."""
