"""A mesh as SVG: nodes with their GPUs and ranks, or the cube of its three largest axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

import numpy as np

from phalanx.planning.placement import Placement, axis_groups
from phalanx.report.mesh import COLOURS, cube, held
from phalanx.report.pictures.scene import framed

NODES_DRAWN = 128
_GPU, _GAP, _TOP, _ACROSS = 38, 4, 56, 1200
_SIDE, _DEPTH = 34, 15  # of a small cube: its front, and the offset of its back


def nodes_svg(p: Placement, axis: str, rank: int | None = None, drawn: Sequence[int] | None = None) -> str:
    """Draw nodes as boxes of GPUs, coloured by the groups of `axis`; `rank` and the peers of its groups are outlined,
    each axis by a stroke of its own. `drawn`: which hosts, by their place; by default the first."""
    hosts = list(p.ranks_by_host())
    group = {int(r): i for i, ranks in enumerate(p.mesh.groups(axis)) for r in ranks}
    columns = min(8, max(len(ranks) for _, ranks in hosts))
    rows = max(-(-len(ranks) // columns) for _, ranks in hosts)
    wide, high = columns * (_GPU + _GAP) + 3 * _GAP, rows * (_GPU + _GAP) + 26
    per_row = max(1, _ACROSS // (wide + 14))
    shown = hosts[:NODES_DRAWN] if drawn is None else [hosts[i] for i in drawn]
    strokes = _strokes(p, rank)
    body: list[str] = []
    for i, (host, ranks) in enumerate(shown):
        left, top = 14 + i % per_row * (wide + 14), _TOP + i // per_row * (high + 12)
        name = f"{p.topology.hosts[host]}: {held(p, ranks)}"
        body.append(
            f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" rx="5" class="paper">'
            f"<title>{escape(name)}</title></rect>"
        )
        body.append(f'<text x="{left + 6}" y="{top + 13}">{escape(name[: wide // 6])}</text>')
        for j, r in enumerate(ranks.tolist()):
            x, y = left + 2 * _GAP + j % columns * (_GPU + _GAP), top + 20 + j // columns * (_GPU + _GAP)
            body += _gpu(p, r, x, y, COLOURS[group[r] % len(COLOURS)] if r in group else "#ffffff", strokes.get(r))
    foot = [f"... and {len(hosts) - len(shown):,} more nodes"] if len(hosts) > len(shown) else []
    foot += [
        f"{row.axis}: {row.groups:,} groups of {row.size:,}, over " + ", ".join(row.tiers) for row in axis_groups(p)
    ]
    lowest = _TOP + -(-len(shown) // per_row) * (high + 12) + 12
    body += [f'<text x="14" y="{lowest + 16 * i}">{escape(line)}</text>' for i, line in enumerate(foot)]
    title = f"{p.strategy} on {p.cluster.name}: colours are groups of {axis}"
    if rank is not None:
        peers = ", ".join(name for name, size in p.mesh.axes if size > 1)
        title += f"; outlined: rank {rank} (thickest) and its groups of {peers}"
    width = max(28 + min(per_row, len(shown)) * (wide + 14), 7 * len(title))
    return _svg(width, lowest + 16 * len(foot), title, body)


def one_of_each_stage(p: Placement) -> list[int]:
    """Return the places of hosts, one for each set of pipeline ranks that share a host: the others look alike."""
    first: dict[frozenset[int], int] = {}
    for i, (_, ranks) in enumerate(p.ranks_by_host()):
        first.setdefault(frozenset(p.mesh.coordinates(int(r)).get("pp", 0) for r in ranks), i)
    return list(first.values())


def _strokes(p: Placement, rank: int | None) -> dict[int, str]:
    """Return the axis by which each rank is a peer of `rank`, the innermost first."""
    if rank is None:
        return {}
    peers = {rank: "itself"}
    for name, size in reversed(p.mesh.axes):
        if size > 1:
            for r in p.mesh.group_of(rank, name):
                peers.setdefault(r, name)
    return peers


_DASHES = {"itself": "", "tp": "", "cp": "6 2", "dp_shard": "4 3", "dp_replicate": "3 2", "pp": "1 3"}


def _gpu(p: Placement, rank: int, x: float, y: float, fill: str, peer: str | None) -> Iterator[str]:
    coordinates = ", ".join(f"{name} {i}" for name, i in p.mesh.coordinates(rank).items())
    outline = 'stroke="#555"' if peer is None else f'stroke="#000" stroke-width="{5 if peer == "itself" else 3}"'
    dash = f' stroke-dasharray="{_DASHES[peer]}"' if peer and _DASHES.get(peer) else ""
    yield (
        f'<rect x="{x}" y="{y}" width="{_GPU}" height="{_GPU}" rx="3" fill="{fill}" {outline}{dash}>'
        f"<title>{escape(f'rank {rank}: {p.where(rank)}; {coordinates}')}</title></rect>"
    )
    yield f'<text x="{x + _GPU / 2}" y="{y + _GPU / 2 + 4}" text-anchor="middle" class="on">{rank}</text>'


def cube_svg(p: Placement, axis: str) -> str:
    """Draw the three largest axes as a cube of ranks in parallel projection: columns to the right, rows down, depth
    to the back, with its slices pulled apart so that every rank is seen; coloured by the groups of `axis`."""
    (depth, rows, columns), ranks = cube(p)
    group = {int(r): i for i, members in enumerate(p.mesh.groups(axis)) for r in members}
    d, h, w = ranks.shape
    step = _SIDE + 6
    body: list[str] = []
    left, top = 40, 60 + d * _DEPTH
    apart = w * step + 2 * _DEPTH  # from one slice to the next
    body += [_edge(left, top, k, j, w, h, (d - 1) * apart) for k in (0, 1) for j in (0, 1) if d > 1]
    for i in reversed(range(d)):  # what is at the back is drawn first
        for j in reversed(range(h)):
            for k in range(w):
                x, y = left + k * step + i * apart, top + j * step * 1.25 - i * _DEPTH
                rank = int(ranks[i, j, k])
                body += _small_cube(p, rank, x, y, COLOURS[group.get(rank, 0) % len(COLOURS)])
    bottom = top + h * step * 1.25 + 22
    if w > 1:
        body.append(f'<text x="{left}" y="{bottom}">{columns} 0 ... {w - 1}, to the right</text>')
    if h > 1:
        body.append(f'<text x="{left}" y="{bottom + 16}">{rows} 0 ... {h - 1}, downwards</text>')
    if d > 1:
        body.append(f'<text x="{left}" y="{bottom + 32}">{depth} 0 ... {d - 1}, to the back</text>')
    title = f"{p.strategy}: {' x '.join(str(n) for n in ranks.shape)} ranks, coloured by the groups of {axis}"
    width = max(left + d * apart + 10, 7 * len(title))
    return _svg(width, bottom + 50, title, body)


def _edge(left: float, top: float, right: int, low: int, w: int, h: int, apart: float) -> str:
    """Draw an edge of the cube from its front to its back slice, behind both."""
    step = _SIDE + 6
    x, y = left + right * (w - 1) * step + _SIDE / 2, top + low * (h - 1) * step * 1.25 + _SIDE / 2
    back = _DEPTH * apart / (w * step + 2 * _DEPTH)
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{x + apart:.1f}" y2="{y - back:.1f}"'
    return f'<line {ends} stroke="#999" stroke-dasharray="3 3"/>'


def _small_cube(p: Placement, rank: int, x: float, y: float, fill: str) -> Iterator[str]:
    s, o = _SIDE, _DEPTH
    coordinates = ", ".join(f"{name} {i}" for name, i in p.mesh.coordinates(rank).items())
    yield f"<g><title>{escape(f'rank {rank}: {coordinates}; {p.where(rank)}')}</title>"
    top = [(x, y), (x + o, y - o), (x + s + o, y - o), (x + s, y)]
    side = [(x + s, y), (x + s + o, y - o), (x + s + o, y + s - o), (x + s, y + s)]
    for face, shade in ((top, 0.25), (side, -0.2)):
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in face)
        yield f'<polygon points="{points}" fill="{_shaded(fill, shade)}" stroke="#444" stroke-width="0.6"/>'
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{s}" height="{s}" fill="{fill}" stroke="#444" stroke-width="0.6"/>'
        f'<text x="{x + s / 2:.1f}" y="{y + s / 2 + 4:.1f}" text-anchor="middle" class="on">{rank}</text></g>'
    )


def _shaded(colour: str, by: float) -> str:
    """Return a colour moved towards white (by > 0) or black."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=float)
    rgb += (255 - rgb) * by if by > 0 else rgb * by
    return "#" + "".join(f"{int(c):02x}" for c in rgb)


def _svg(width: float, height: float, title: str, body: list[str]) -> str:
    head = f'<text x="14" y="24" font-size="13" class="t">{escape(title)}</text>'
    source = "the placement that `phalanx mesh` prints"
    foot = f'<text x="14" y="{height + 6:.0f}" class="m">Source: {source}</text>'
    group = ['<g font-size="11" class="t">', head, *body, foot, "</g>"]
    return framed(width, height + 16, title, f"Source: {source}", group)
