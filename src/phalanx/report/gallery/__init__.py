"""Pictures that commands draw with `--save`: a function each, whose numbers are those that the command prints."""
