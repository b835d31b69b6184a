"""`phalanx generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.terminal import (
    Json,
    mistakes,
    print_json,
    require_torch,
)


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "It is a truth",
    tokens: Annotated[int, typer.Option(help="How many tokens to add.")] = 80,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    tp: Annotated[int, typer.Option(help="Local ranks that split every layer.")] = 1,
    as_json: Json = False,
) -> None:
    """Continue a text with the newest checkpoint of a run."""
    with mistakes():
        require_torch()
        from phalanx.commands.this_machine import require_local
        from phalanx.infer.generate import Sampling
        from phalanx.infer.generate import generate as alone
        from phalanx.infer.worker import over_ranks

        require_local(tp, "--tp")
        how = Sampling(tokens, temperature, top_k, seed)
        text = alone(run, prompt, how) if tp == 1 else over_ranks(run, prompt, how, tp)
        if as_json:
            print_json({"prompt": prompt, "text": text})
        else:
            print(text)
