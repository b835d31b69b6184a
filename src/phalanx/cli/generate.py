"""`phalanx generate`: continue texts with a trained model, on one process or split over local ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.command import command_with_progress
from phalanx.cli.output import Display
from phalanx.cli.terminal import require_torch


@command_with_progress
def generate(
    output: Annotated[Display, "json"],
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|HF_DIR",
            help="A run's folder, such as runs/quickstart, or a folder of Hugging Face weights.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to continue; may be repeated. Without one: It is a truth.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with a prompt on each line.", show_default=False)
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Number of tokens to add at most; without it 80, or as many as the context has room for."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 takes the most likely token each time.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 samples from all.")] = 50,
    top_p: Annotated[
        float, typer.Option(help="Sample from the fewest likely tokens with this probability; 1 samples from all.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    past_end: Annotated[bool, typer.Option("--past-end", help="Go on after the model's end-of-text token.")] = False,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="LINE",
            help="How the model is split over local ranks: tp, pp, ep and etp; dp divides the prompts. Such as tp=2.",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="float64|float32|bfloat16|float16", help="Type to compute in; without it, that of the weights."
        ),
    ] = None,
    slots: Annotated[int, typer.Option(help="Prompts that a replica continues at once.")] = 16,
    chunk: Annotated[
        int, typer.Option(help="Tokens that a replica computes in a step at most: longer prompts go in chunks.")
    ] = 512,
    page: Annotated[int, typer.Option(help="Tokens of a page of the KV cache.")] = 16,
    pages: Annotated[
        int | None, typer.Option(help="Pages of a replica's KV cache; without it, enough for all slots.")
    ] = None,
) -> None:
    """Continue texts with the newest checkpoint of a run, or with Hugging Face weights."""
    require_torch()
    from phalanx.answers.generate import generate as continue_texts
    from phalanx.infer.sampling import Sampling
    from phalanx.runtime.process.environment import external
    from phalanx.schedule.generation import BatchingPolicy
    from phalanx.spec.errors import InputError

    sampling = Sampling(tokens, temperature, top_k, seed, top_p, not past_end)
    policy = BatchingPolicy(slots, chunk, page, pages)
    world, stream = external(), not output.json
    try:
        answer = continue_texts(run, prompt or [], prompts, sampling, policy, strategy, precision, stream, world)
    except InputError:
        if world is not None and world.rank:  # rank 0 says the same
            raise typer.Exit(2) from None
        raise
    if output.json and (world is None or world.rank == 0):  # as text they were printed as they came
        output.show(answer)
