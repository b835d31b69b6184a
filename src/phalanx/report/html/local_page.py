"""The page of `phalanx ui`: controls, the latest answer drawn as reports are, two answers side by side, runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from phalanx.report.html.page import asset

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "frame-src 'self'; frame-ancestors 'self'; form-action 'none'; base-uri 'none'"
)
"""Nothing but this server is asked for anything."""


def local_page(
    models: Sequence[str], clusters: Sequence[str], stacks: Sequence[str], frameworks: Sequence[str]
) -> str:
    """Return the page. The lists are what its selections offer; `frameworks`: what plans are exported to."""

    def select(name: str, names: Sequence[str], chosen: str) -> str:
        options = "".join(f"<option{' selected' if n == chosen else ''}>{escape(n)}</option>" for n in names)
        return f'<label>{name}<select id="{name}">{options}</select></label>'

    def amount(name: str, text: str, power: int, most: int) -> str:
        """A number and a slider over powers of two."""
        return (
            f'<div class="amount"><label for="{name}">{text}</label>'
            f'<input type="number" id="{name}" min="1" value="{2**power}">'
            f'<input type="range" id="{name}-power" aria-label="{text}, powers of two" min="0" max="{most}" '
            f'value="{power}"></div>'
        )

    form = (
        select("model", models, "llama3-70b")
        + select("cluster", clusters, "dgx-h100")
        + select("stack", stacks, "megatron-core")
        + amount("gpus", "GPUs", 6, 13)
        + amount("batch", "batch, sequences", 9, 14)
        + amount("seq", "sequence, tokens", 12, 17)
        + '<label>conditions<input id="where" placeholder="tp&lt;=8, zero=1" autocomplete="off" spellcheck="false">'
        '</label><label><span>memory left free <output id="headroom-shown"></output></span>'
        '<input type="range" id="headroom" min="0" max="50" value="5"></label>'
    )
    buttons = (
        '<button type="button" id="stop" disabled>Stop</button>'
        '<button type="button" id="keep" disabled>Keep for comparison</button>'
        '<button type="button" id="plan" disabled>Download plan.json</button>'
        '<button type="button" id="report" disabled>Download the report</button>'
    )
    buttons += (
        '<select id="export" aria-label="Download for a framework" disabled>'
        '<option value="">Download for ...</option>'
        + "".join(f"<option>{escape(name)}</option>" for name in frameworks)
        + "</select>"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>Phalanx</title><style>{asset('report.css')}{asset('local_page.css')}</style></head><body>\n"
        '<a class="skip" href="#main">Skip to the answer</a>'
        '<header><h1>Phalanx</h1><div role="tablist" aria-label="What is shown">'
        '<button role="tab" id="to-plan" aria-selected="true" aria-controls="planned">Plan</button>'
        '<button role="tab" id="to-runs" aria-selected="false" aria-controls="trained">Runs</button></div>'
        '<span id="state" role="status"></span></header>'
        '<p id="problem" role="alert" hidden></p>\n'
        f'<div id="planned" role="tabpanel" aria-labelledby="to-plan"><form id="question">{form}'
        f'<div class="buttons">{buttons}</div><progress id="searching" hidden></progress></form>\n'
        '<div><dl id="figures"></dl><div id="compared" class="wide"></div>\n<main id="main">'
        "<noscript>This page needs scripts.</noscript></main></div></div>\n"
        '<div id="trained" role="tabpanel" aria-labelledby="to-runs" hidden>'
        '<label>run<select id="runs"></select></label><p id="no-runs" class="note" hidden></p>'
        '<div id="run"></div></div>\n'
        f"<script>{asset('report.js')}</script><script>{asset('local_page.js')}</script></body></html>\n"
    )
