"""The listings to read: each runs on four ranks, and compares itself with one process."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.rank_pool import Pool, Where

FOLDER = Path(__file__).parents[2] / "examples" / "listings"
LISTINGS = sorted(FOLDER.glob("*.py"))


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    pool = Pool(Where(4, 4))
    yield pool
    pool.stop()


def _listing_main(world: object, file: str) -> str:
    listing = runpy.run_path(file)
    listing["main"]()
    return str(listing["__doc__"])


@pytest.mark.parametrize("file", LISTINGS, ids=lambda file: file.stem)
def test_a_listing_equals_one_process(four: Pool, file: Path) -> None:
    (about, *_) = four.run(4, _listing_main, str(file))
    assert f"examples/listings/{file.name}" in about
    assert "usual listing gets wrong" in about


@pytest.mark.parametrize("file", LISTINGS, ids=lambda file: file.stem)
def test_a_listing_is_short_and_needs_torch_alone(file: Path) -> None:
    """Under 60 lines of code: neither blank nor of its description."""
    code = file.read_text().split('"""', 2)[2]
    assert sum(bool(line.strip()) for line in code.splitlines()) < 60
    imported = {line.split()[1].split(".")[0] for line in code.splitlines() if line.startswith(("import", "from"))}
    assert imported <= {"torch", "itertools"}


@pytest.mark.parametrize("file", LISTINGS, ids=lambda file: file.stem)
def test_a_listing_leaves_no_group_behind(file: Path) -> None:
    """torch/distributed/nn/functional.py takes the group of the moment as a default, and torch.optim imports it.

    A group that is kept is not destroyed; its threads then ask for the interpreter's lock while it ends, and abort.
    """
    code = file.read_text()
    assert "torch.optim" not in code or "\nimport torch.distributed.nn" in code
    assert code.rstrip().endswith("dist.destroy_process_group()")
