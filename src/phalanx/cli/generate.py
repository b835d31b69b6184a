"""`phalanx generate`: continue a text with a trained model."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.options import Json, Run
from phalanx.cli.terminal import exit_on_error, print_json, require_torch


def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "It is a truth",
    tokens: Annotated[int, typer.Option(help="Number of tokens to add.")] = 80,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 takes the most likely token each time.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 samples from all.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    tp: Annotated[
        int, typer.Option(help="Number of local ranks that every layer is split over (tensor parallelism).")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Continue a text with the newest checkpoint of a run."""
    with exit_on_error():
        require_torch()
        from phalanx.commands.this_machine import require_local
        from phalanx.infer.generate import Sampling
        from phalanx.infer.generate import generate as on_one_rank
        from phalanx.infer.worker import over_ranks

        require_local(tp, "--tp")
        sampling = Sampling(tokens, temperature, top_k, seed)
        text = on_one_rank(run, prompt, sampling) if tp == 1 else over_ranks(run, prompt, sampling, tp)
        if as_json:
            print_json({"prompt": prompt, "text": text})
        else:
            print(text)
