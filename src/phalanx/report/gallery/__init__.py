"""Pictures that commands draw with `--plot`: a function each, whose numbers are those that the command prints."""
