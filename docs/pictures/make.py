"""Draw every picture of docs/pictures.md, and make the page: `python docs/pictures/make.py`.

The pictures are those of `phalanx draw NAME --plot FILE.svg`; tests/docs/test_pictures_page.py compares them."""

from __future__ import annotations

from pathlib import Path

from phalanx.report.pictures.files import svg
from phalanx.textbook.gallery.registry import PICTURES, options_of, picture

HERE = Path(__file__).parent
PAGE = HERE.parent / "pictures.md"
HEADS = {
    "hardware": "Chips and links",
    "memory": "Memory",
    "collectives": "Collectives",
    "data_parallel": "Data parallelism",
    "compression": "Compression",
    "layers": "Inside layers",
    "experts": "Experts",
    "pipelines": "Pipelines",
    "scaling": "Scaling",
    "choosing": "Choosing and sharing",
    "growth": "Models",
}
"""By the module that draws them."""
ABOUT = """# Pictures

What a teacher would draw on a whiteboard, drawn from the numbers that the commands print: none is typed in. Made by
`python docs/pictures/make.py`.

    phalanx draw                                      # the list; with --plot all.html, all of them on one page
    phalanx draw fsdp --model llama3-8b --gpus 64     # as text of 80 columns, without colour
    phalanx draw fsdp --plot fsdp.svg                 # as SVG; .html: a page; .png: by Chromium

One style: colours that colour-blind people can tell apart (Okabe and Ito), light or dark by the reader's own setting,
axes with units, and the source of the numbers below. An SVG needs nothing else and makes no request. PNG is drawn by
Chromium, since a library that rasterises would be a dependency for this alone; without it, --plot says so in a line.

Where a command's subject has a picture, its own `--plot FILE.svg|html|png` draws it for your model, cluster or run:
`roofline`, `memory`, `comm`, `scaling`, `cases --tree`, `clusters [NAME]`, `collectives show` and `table`, `pipeline
show`, `mesh`, `place`, `cluster simulate`, `experts show`, `measure`, `sweep`. A picture that `draw` knows takes what
it depends on, and refuses other options; `--json` gives what is drawn as data.
"""


def page() -> str:
    """Return the page as Markdown."""
    lines = [ABOUT]
    for module, head in HEADS.items():
        lines += [f"## {head}", ""]
        for name, entry in PICTURES.items():
            if entry.draw.__module__.rpartition(".")[2] != module:
                continue
            takes = f", takes `{'`, `'.join(options_of(name))}`" if options_of(name) else ""
            yours = f"; of yours: `phalanx {entry.instead}`" if entry.instead else ""
            lines += [f"{entry.what}: `phalanx draw {name}`{takes}{yours}.", ""]
            lines += [f"![{entry.what}](pictures/{name}.svg)", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write the page and every picture."""
    for old in HERE.glob("*.svg"):
        old.unlink()
    for name in PICTURES:
        (HERE / f"{name}.svg").write_text(svg(picture(name)))
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
