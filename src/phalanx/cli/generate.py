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
    run: Path,
    prompt: list[str] | None = None,
    prompts: Path | None = None,
    tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    past_end: bool = False,
    strategy: str | None = None,
    precision: str | None = None,
    slots: int = 16,
    chunk: int = 512,
    page: int = 16,
    pages: int | None = None,
) -> None:
    """Continue texts with the newest checkpoint of a run, or with Hugging Face weights.

    run RUN|HF_DIR: A run's folder, such as runs/quickstart, or a folder of Hugging Face weights.
    --prompt: Text to continue; may be repeated. Without one: It is a truth.
    --prompts FILE: A file with a prompt on each line.
    --tokens: Number of tokens to add at most; without it 80, or as many as the context has room for.
    --temperature: Sampling temperature; 0 takes the most likely token each time.
    --top-k: Sample from the k most likely tokens; 0 samples from all.
    --top-p: Sample from the fewest likely tokens with this probability; 1 samples from all.
    --seed: Seed of the sampling.
    --past-end: Go on after the model's end-of-text token.
    --strategy LINE: How the model is split over local ranks: tp, pp, ep and etp; dp divides the prompts. Such as
        tp=2.
    --precision float64|float32|bfloat16|float16: Type to compute in; without it, that of the weights.
    --slots: Prompts that a replica continues at once.
    --chunk: Tokens that a replica computes in a step at most: longer prompts go in chunks.
    --page: Tokens of a page of the KV cache.
    --pages: Pages of a replica's KV cache; without it, enough for all slots.
    """
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
