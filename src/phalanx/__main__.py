"""`python -m phalanx` is `phalanx`; so `torchrun -m phalanx train job.toml` works too."""

from phalanx.cli.app import main

main()
