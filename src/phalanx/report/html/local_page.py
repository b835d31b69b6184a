"""The page of `phalanx ui`: a form, the sections of the latest answer, a comparison, runs; drawn as reports are."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from phalanx.report.html.page import asset, safe_json

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "frame-src 'self'; frame-ancestors 'self'; form-action 'none'; base-uri 'none'"
)
"""Nothing but this server is asked for anything."""
_STYLE = """
form{display:grid;grid-template-columns:repeat(auto-fit,minmax(15rem,1fr));gap:.6rem 1.2rem;align-items:end}
label{display:flex;flex-direction:column;gap:.2rem}select,input,button{font:inherit;max-width:100%}
#problem{border-left:.3rem solid #d55e00;padding:.4rem .8rem}iframe{width:100%;height:40rem;border:1px solid #888}
"""


def local_page(models: Sequence[str], clusters: Sequence[str], stacks: Sequence[str]) -> str:
    """Return the page. The three lists are what its selections offer."""

    def select(name: str, names: Sequence[str], chosen: str) -> str:
        options = "".join(f"<option{' selected' if n == chosen else ''}>{escape(n)}</option>" for n in names)
        return f'<label>{name}<select id="{name}">{options}</select></label>'

    def slider(name: str, power: int, most: int) -> str:
        return (
            f'<label><span>{name}: <output id="{name}-shown"></output></span>'
            f'<input type="range" id="{name}" min="0" max="{most}" value="{power}"></label>'
        )

    form = (
        select("model", models, "llama3-70b")
        + select("cluster", clusters, "dgx-h100")
        + select("stack", stacks, "megatron-core")
        + slider("gpus", 6, 13)
        + slider("batch", 9, 14)
        + slider("seq", 12, 17)
        + '<label>conditions<input id="where" placeholder="tp&lt;=8, zero=1"></label>'
        + '<label><span>memory left free: <output id="headroom-shown"></output></span>'
        '<input type="range" id="headroom" min="0" max="50" value="5"></label>'
    )
    scripts = "".join(f"<script>{asset(name)}</script>" for name in ("d3.min.js", "plot.umd.min.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>Phalanx</title><style>{asset('report.css')}{_STYLE}</style></head><body>\n"
        '<a class="skip" href="#main">Skip to the answer</a><header><h1>Phalanx</h1></header>'
        f'<form id="question">{form}</form>'
        '<p><button id="stop" disabled>Stop</button> <button id="keep" disabled>Keep for comparison</button> '
        '<button id="plan" disabled>Download plan.json</button> '
        '<button id="report" disabled>Download the report</button> <span id="state" role="status"></span></p>'
        '<p id="problem" role="alert" hidden></p><div id="compared"></div>\n<main id="main"></main>\n'
        '<section><h2>Runs</h2><p><select id="runs" aria-label="Run"><option value="">choose a run</option></select>'
        '</p><div id="run"></div></section>\n'
        f'<script type="application/json" id="data">{safe_json({"charts": []})}</script>\n{scripts}'
        f"<script>{asset('report.js')}</script><script>{asset('local_page.js')}</script></body></html>\n"
    )
