"""Blanks of a run, which no plan can know: its data, its folders, and lr and steps where the plan has none."""

from phalanx.frameworks.writing.program import FILL_IN, Blank
from phalanx.frameworks.writing.subject import Subject


def blanks(
    x: Subject,
    data: str,
    tokenizer: str = "A Hugging Face tokenizer",
    folder: str = "checkpoints",
    final: bool = False,
) -> tuple[Blank, ...]:
    """Return the blanks of train.sh. `data`: the form of the data; `folder`: what its folder is for; `final`: whether
    the learning rate at the end of its decay is one."""
    t = x.training
    lr, steps = (FILL_IN if known is None else f"{known:.12g}" for known in (t.lr, t.steps))
    end = (Blank("MIN_LR", "Learning rate at the end of its decay.", x.final_lr),) if final else ()
    return (
        Blank("DATA_PATH", f"Training data: {data}."),
        Blank("TOKENIZER", f"{tokenizer}, of {x.model.vocab:,} tokens at most."),
        Blank("CHECKPOINTS", f"Folder for {folder}, on a file system that all nodes see."),
        Blank("LR", "Peak learning rate.", lr),
        *end,
        Blank("TRAIN_ITERS", "Optimizer steps.", steps),
    )
