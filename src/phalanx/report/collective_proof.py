"""A proved collective as people see it: one line."""

from __future__ import annotations

from phalanx.answers.collectives import CollectiveProof
from phalanx.report.style import counted
from phalanx.report.view import View


def view(p: CollectiveProof) -> View:
    """Return what is proved, and what the algorithm sends."""
    sent = f"{counted(p.rounds, 'round')}, {counted(p.messages, 'message')}"
    return View([f"proved: {p.op} by {p.algorithm}; {sent}, at most {p.sent_share:.4g} of the buffer sent by a rank"])
