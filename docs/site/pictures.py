"""The page of pictures, and every picture that `phalanx learn draw` draws."""

from __future__ import annotations

from phalanx.report.pictures.files import svg
from phalanx.textbook.answers import PICTURES, animated, has_steps, options_of, picture

HEADS = {
    "hardware": "Chips and links",
    "memory": "Memory",
    "collectives": "Collectives",
    "patterns": "Ways to divide a training",
    "data_parallel": "Data parallelism",
    "replicas_alone": "Replicas that step alone",
    "layers": "Inside layers",
    "experts": "Experts",
    "pipelines": "Pipelines",
    "stale_pipelines": "Pipelines",
    "scaling": "Scaling",
    "choosing": "Choosing and sharing",
    "growth": "Models",
}
"""By the module that draws them."""
ABOUT = """# Pictures

What a teacher draws on a whiteboard, drawn from the numbers that the commands print.

    phalanx learn draw                                    # the list; with --save all.html, all of them on one page
    phalanx learn draw fsdp --model llama3-8b --gpus 64   # as text of 80 columns
    phalanx learn draw fsdp --save fsdp.svg               # as SVG; .html: a page; .png: by Chromium, if installed
    phalanx learn draw fsdp --save fsdp.svg --moving      # its blocks or rounds appear one after another

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; pictures follow the reader's light or
dark setting, and name the source of their numbers below. An SVG needs no other file and makes no request.

Commands draw their own subject with `--save FILE.svg|html|png`, for your model, cluster or run. A picture takes only
the options that it depends on, and refuses others; `--json` prints what is drawn as data.
"""


def page() -> str:
    """Return the page as Markdown. Raises KeyError for a picture of a module without a heading."""
    sections: dict[str, list[str]] = {head: [] for head in HEADS.values()}
    for name, entry in PICTURES.items():
        takes = f", takes `{'`, `'.join(options_of(name))}`" if options_of(name) else ""
        yours = f"; of yours: `phalanx {entry.instead}`" if entry.instead else ""
        sections[HEADS[entry.draw.partition(":")[0].rpartition(".")[2]]] += [
            f"{entry.what}: `phalanx learn draw {name}`{takes}{yours}.",
            f"![{entry.what}](pictures/{name}.svg)",
            *([f"[Step by step](pictures/{name}.moving.svg)."] if has_steps(picture(name)) else []),
        ]
    parts = [ABOUT.rstrip(), *("\n\n".join([f"## {head}", *lines]) for head, lines in sections.items())]
    return "\n\n".join(parts) + "\n"


def drawings() -> dict[str, str]:
    """Return every picture as SVG, by file name, and those with steps also moving."""
    drawn = {name: picture(name) for name in PICTURES}
    still = {f"{name}.svg": svg(p) for name, p in drawn.items()}
    return still | {f"{name}.moving.svg": svg(animated(p, name)) for name, p in drawn.items() if has_steps(p)}
