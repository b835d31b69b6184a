"""The commands `phalanx learn ...`."""

from __future__ import annotations

import typer

from phalanx.textbook.cli.cases import cases
from phalanx.textbook.cli.draw import draw
from phalanx.textbook.cli.quiz import quiz

learn = typer.Typer(help="Teaching: pictures, exercises, published trainings.", no_args_is_help=True)
for _command in (draw, quiz, cases):
    learn.command()(_command)
