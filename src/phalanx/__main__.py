"""`python -m phalanx`, and the `phalanx` program."""

import signal


def main() -> None:
    """Run the command line. Until it is imported, Ctrl-C ends the process at once, without a trace."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # ignored under nohup and in scripts
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from phalanx.cli.app import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
