"""`phalanx simulate`: a step with slow ranks, and a training with its failures."""

from dataclasses import dataclass, replace
from typing import Annotated

from phalanx.cli.command import Stated, command
from phalanx.cli.forms import forms
from phalanx.cli.options import StepQuery
from phalanx.cli.output import Display, show_notes
from phalanx.cli.strategies import simulate_step


@dataclass(frozen=True)
class ConditionWords:
    """What a training meets, as a user spells it (conditions_by_name.py)."""

    failures: str | None = None
    mttf: str | None = None
    restart: str = "in-job"
    detect: str | None = None
    restart_time: str | None = None
    silent: str | None = None
    interval: str | None = None
    storage: str | None = None
    write: str | None = None
    read: str | None = None
    checkpoint: str = "shared"
    checkpoint_bytes: str | None = None
    synchronous: bool = False
    spares: int | None = None
    repair: str | None = None
    elastic: bool = False


@command
def goodput(
    query: StepQuery,
    output: Annotated[Display, "json", "save", "strict", "assertions"],
    words: Annotated[Stated, ConditionWords],
    days: float | None = None,
    tokens: str | None = None,
    price: float | None = None,
    rates: str | None = None,
    trials: int = 200,
    seed: int = 0,
) -> None:
    """Say how much of a training's time is work, with failures, restarts and checkpoints: days, money, energy,
    carbon, the best interval between saves, how many spare nodes, and what would help most.

    Name a plan, or --model, --cluster, --gpus, --batch, --seq and --strategy; and --days or --tokens.

    --days 54: Length of the training in days.
    --tokens 15T: Tokens to train, in place of --days.
    --failures NAME|LOG.csv: Preset of failure rates, or a log with the columns hours and component.
    --mttf 3h: Mean time between failures of this job, in place of a preset's.
    --restart KIND: How it comes back: manual, job, in-job or in-process.
    --detect 5min: Time until a failure is known.
    --restart-time 4min: Time from then until the checkpoint is being loaded.
    --silent 1h: Time until silent corruption is found.
    --interval 30min: Work between saves; by default the best.
    --storage NAME: shared, tectonic, gpfs, nfs-b200, nas or local.
    --write 2TB: Bytes per second that all nodes write together.
    --read 7TB: Bytes per second that all nodes read together.
    --checkpoint PLACE: shared, local (a node's disks) or replicated (in the memory of two nodes).
    --checkpoint-bytes 5TB: Size of a checkpoint; by default that of the layout.
    --synchronous: Training stops until a save is durable.
    --spares NODES: Spare nodes; by default those with which the work takes the least GPU-hours.
    --repair 1d: Time until a failed node is back.
    --elastic: Without a spare, work on with one replica fewer.
    --price 2.5: Price of a GPU-hour, in any currency; by default the published one of its chip.
    --trials N: Simulated trainings.
    --seed N: Seed of the simulation.
    """
    from phalanx.answers.question.resolution import read as read_question
    from phalanx.planning import budget
    from phalanx.planning.expense.rates import read_rates
    from phalanx.reliability.answer import goodput as answer
    from phalanx.reliability.conditions_by_name import conditions_of

    given = replace(conditions_of(words), rates=read_rates(rates, price))
    count = None
    if tokens is not None:
        question = read_question(query)
        model = question.exact.model if question.exact else question.pricing.model
        count = budget.tokens(tokens, model)
        show_notes(question.notes)
    output.show(answer(query, days=days, tokens=count, given=given, trials=trials, seed=seed))


simulate = forms(
    "Simulate a step with slow ranks and links: who waits for whom; or a whole training with failures.",
    lambda _: "step",
    step=simulate_step,
    goodput=goodput,
)
