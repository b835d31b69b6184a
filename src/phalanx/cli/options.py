"""Options and arguments that several commands share, and the completion of --model, --cluster and --stack by a shell:
names of presets, else files. Tables are imported only when a shell asks.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated

from phalanx.answers.question.query import Query
from phalanx.spec.number_formats import PRECISIONS


def _names_in(module: str, table: str) -> Callable[[str], list[str]]:
    """Return a function that lists the names of a table that begin with a word."""

    def complete(incomplete: str) -> list[str]:
        return sorted(name for name in getattr(import_module(module), table) if name.startswith(incomplete))

    return complete


COMPLETED = {
    "model": _names_in("phalanx.spec.model.presets", "PRESETS"),
    "cluster": _names_in("phalanx.spec.cluster.presets", "PRESETS"),
    "stack": _names_in("phalanx.frameworks.registry", "STACKS"),
}
_SAVE = "Also write it, as the ending of each FILE says: a page that needs nothing else, a picture (PNG by Chromium)"
SHARED = f"""
job JOB.toml: The job file.
overrides --set TABLE.FIELD=VALUE: Override a field of the job; may be repeated.
changes --set model.FIELD=VALUE: Change a field of the model, e.g. model.max_seq=32768; repeatable.
source FILE...: A plan written by `phalanx plan`, a run's folder, or another framework's configuration with the files
    that belong to it; without one, name the model, the cluster and the rest with options.
--strategy LINE: Strategy, such as tp=8,zero=1: replaces that of a job file or a plan; dp takes the other GPUs. Of
    a search with --model: fields to keep: tp=8,pp=*.
--model NAME|FILE: Model: a preset, a config.json or TOML.
--cluster NAME|FILE.toml: One of `phalanx tables clusters`, a chip (h100), 8xH100, or a TOML file.
--gpus: Number of GPUs.
--batch: Global batch: sequences per step, over all GPUs.
--seq: Tokens of a sequence: 8192 or 8k.
--stack STACK: Stack that is priced; by default the plan's, else megatron-core, on TPUs maxtext.
--precision: Precision of matrix products: {", ".join(PRECISIONS)}; by default bf16, or fp16 where there is none.
--options LINE: Options of the stack, such as first_moment=bfloat16,loss_as_layer=1 (docs/stacks.md lists them).
--where CONDITIONS: Conditions on the strategies, such as 'tp<=8, zero=1, schedule in (1f1b, interleaved)', and
    options of the stack, such as 'first_moment=bfloat16'.
--calibration FILE.toml: Factors of your own machines, by `phalanx measure steps`.
--params 25M: Number of parameters, for tables that need no model's shape.
run RUN: A run's folder, such as runs/quickstart.
--rates LINE: Your own price of a GPU-hour, provider (specialised, hyperscaler, marketplace), watts of a GPU with
    its part of the node, pue, grid (SWE, SE3, us-central1, or g/kWh): price=2.5,grid=SWE.
--json: Print the result as JSON; progress goes to stderr.
--strict: Exit with code 1 if what matters to a price is not modelled, not judged, assumed or missing.
assertions --assert LINE: Exit with code 1 unless these hold of the answer, such as 'memory<75GiB, step<20s, mfu>0.4,
    fits': fields of --json, with or without their unit.
--save FILE.html|svg|png|csv: {_SAVE}, or its tables; csv alone prints them.
"""
"""Entries as command.py reads them."""

QUERY_TYPES = {
    **{"source": list[Path] | None, "model": str | None, "cluster": str | None},
    **dict.fromkeys(("gpus", "batch", "seq"), int | None),
    **dict.fromkeys(("strategy", "stack", "precision", "options", "where"), str | None),
    **{"calibration": Path | None, "changes": list[str] | None},
}
"""Field of a Query -> type of its option."""
STRATEGY_FIELDS = tuple(name for name in QUERY_TYPES if name != "where")
StepQuery = Annotated[Query, STRATEGY_FIELDS]
"""A question about one strategy."""
OUTPUT_TYPES = {"json": bool, "save": list[Path] | None, "strict": bool, "assertions": str | None}
