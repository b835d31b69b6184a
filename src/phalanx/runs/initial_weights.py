"""Initial weights of a run: the weights that train.weights names, their tokenizer, and their companion files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from phalanx.runs.folder import RUNS
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import JobFile
from phalanx.spec.job import Train

TOKENIZER = "tokenizer.json"
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def companions(folder: Path) -> list[Path]:
    """List the companion files of a folder of weights, which are copied with them on import and export."""
    return [folder / name for name in _COMPANIONS if (folder / name).is_file()]


def start_from_weights(file: JobFile, announce: Callable[[str], None]) -> JobFile:
    """Announce the weights that train.weights names, and return the job; if it has texts to encode and names no
    tokenizer, with the one from the folder of the weights. Raises InputError if the weights do not fit the model, or
    lie in the run's own folder."""
    from phalanx.nn.weight_files import introduce
    from phalanx.training.data import holds_ids

    train = file.train
    own, source = (RUNS / train.name).resolve(), Path(train.weights).resolve()
    if own in (source, *source.parents):
        raise InputError("train.weights", train.weights, "is this run's own folder", "choose another train.name")
    for line in introduce(Path(train.weights), file.model):
        announce(line)
    theirs = _folder(train) / TOKENIZER
    if train.tokenizer:
        if theirs.is_file() and not _same_tokenizer(train):
            announce(f"note: train.tokenizer = {train.tokenizer!r} differs from the weights' own, {theirs}")
    elif not holds_ids(train.data):
        if theirs.is_file():
            announce(f"weights: train.tokenizer = {str(theirs)!r}, from the folder of the weights")
            return replace(file, train=replace(train, tokenizer=str(theirs)))
        announce(
            f"note: no {TOKENIZER} in the folder of the weights: one is trained on the texts, and the weights do not "
            "know its ids"
        )
    return file


def companion_files(train: Train) -> list[Path]:
    """List the companion files of the initial weights that are copied into the run's folder for a later export: all
    but the tokenizer if the run uses the weights' own, else none."""
    return (
        [f for f in companions(_folder(train)) if f.name != TOKENIZER]
        if train.weights and _same_tokenizer(train)
        else []
    )


def _folder(train: Train) -> Path:
    path = Path(train.weights)
    return path if path.is_dir() else path.parent


def _same_tokenizer(train: Train) -> bool:
    """Whether the job's tokenizer equals the one in the folder of its weights, byte for byte."""
    path, theirs = Path(train.tokenizer), _folder(train) / TOKENIZER
    path = path / TOKENIZER if path.is_dir() else path
    return path.is_file() and theirs.is_file() and path.read_bytes() == theirs.read_bytes()
