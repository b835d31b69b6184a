// Draws every chart of the page from the JSON in #data. Colours: Okabe and Ito 2008, told apart by the colour-blind.
"use strict";
(() => {
  const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999",
    "#8ed1b6", "#7b5ea7", "#a0623a", "#ffb3c1"]; // the last four for more than eight parts
  const PAPER = 680; // CSS pixels across a printed page
  let printing = false;
  const wide = () => printing ? PAPER
    : Math.max(320, Math.min(1080, document.getElementById("main").clientWidth - 8));
  const base = (more) => ({
    width: wide(), marginLeft: 150, style: { background: "transparent", color: "currentColor", fontSize: "12px" },
    color: { range: COLOURS, legend: true }, ...more,
  });
  const power = (v) => v >= 1e4 ? v.toLocaleString("en", { notation: "compact" }) : v >= 1 ? v.toLocaleString("en") : v.toPrecision(1);

  // Names stand left of their rows, or above them where that would leave too little for the rows (on a phone).
  const named = (names, row) => {
    const needed = 14 + 6.6 * Math.max(...names.map((n) => n.length));
    const above = needed > wide() * 0.42;
    return {
      rows: names.length * (above ? row + 16 : row), marginLeft: above ? 22 : needed, inset: above ? { insetTop: 17 } : {},
      y: { label: null, domain: names, ...(above ? { axis: null } : {}) },
      dy: above ? 8 : 0, // from the middle of a row to the middle of its bar
      marks: above ? [Plot.text(names, { y: (n) => n, text: (n) => n, frameAnchor: "left", textAnchor: "start",
        lineAnchor: "top", dx: 2, dy: -(row + 16) / 2 + 3, fill: "currentColor" })] : [],
    };
  };

  const drawn = {
    waterfall: (c) => {
      let at = 0;
      const bars = c.steps.map((s) => {
        const bar = { ...s, from: s.kind === "total" ? 0 : at, to: s.kind === "total" ? s.value : at + s.value };
        at = bar.to;
        return bar;
      });
      const lanes = named(bars.map((b) => b.name), 26);
      return Plot.plot(base({
        height: 48 + lanes.rows, marginLeft: lanes.marginLeft, marginRight: 70, marginBottom: 34,
        x: { label: c.unit, grid: true, ticks: wide() / 90 }, y: lanes.y,
        marks: [
          Plot.barX(bars, { x1: "from", x2: "to", y: "name", fill: "kind", tip: true, ...lanes.inset,
            title: (b) => `${b.name}: ${b.text ?? b.value}` }),
          Plot.text(bars, { x: "to", y: "name", text: "text", textAnchor: "start", dx: 4, dy: lanes.dy, fill: "currentColor" }),
          Plot.ruleX([0]),
          ...lanes.marks,
        ],
      }));
    },
    stack: (c) => {
      const lanes = named([...new Set(c.bars.map((b) => b.bar))], 34);
      return Plot.plot(base({
        height: 66 + lanes.rows, marginLeft: lanes.marginLeft, marginRight: 60, marginTop: 28, marginBottom: 34,
        x: { label: c.unit, grid: true, ticks: wide() / 90 }, y: lanes.y,
        color: { range: COLOURS, legend: true, domain: [...new Set(c.bars.map((b) => b.part))] },
        marks: [
          Plot.barX(c.bars, { x: "value", y: "bar", fill: "part", tip: true, ...lanes.inset,
            order: [...new Set(c.bars.map((b) => b.part))], title: (b) => `${b.part}: ${b.text ?? b.value}` }),
          ...(c.limit ? [
            Plot.ruleX([c.limit.value], { stroke: "#d55e00", strokeWidth: 2, strokeDasharray: "4 2" }),
            Plot.text([c.limit], { x: "value", text: "name", frameAnchor: "top", dy: -8, fill: "currentColor" }),
          ] : []),
          Plot.ruleX([0]),
          ...lanes.marks,
        ],
      }));
    },
    scatter: (c) => Plot.plot(base({
      height: 420, marginLeft: 70, marginRight: 44, marginBottom: 42,
      x: { label: c.x, labelOffset: 36, type: c.log ? "log" : "linear", grid: true, nice: true, ...(c.log ? { tickFormat: power, ticks: wide() / 160 } : {}) },
      y: { label: c.y, type: c.log ? "log" : "linear", grid: true, nice: true, ...(c.log ? { tickFormat: power, ticks: 6 } : {}) },
      marks: [
        ...(c.roofs ?? []).map((r) => Plot.line([[r.x1, r.y1], [r.x2, r.y2]], { stroke: "currentColor", strokeWidth: 1.5 })),
        ...(c.limit ? [Plot.ruleY([c.limit.value], { stroke: "#d55e00", strokeDasharray: "4 2" })] : []),
        Plot.dot(c.points, { x: "x", y: "y", fill: "series", symbol: "series", r: 5, tip: true,
          title: (p) => `${p.label}` }),
      ],
    })),
    lines: (c) => {
      const points = c.series.flatMap((s) => s.points.map(([x, y]) => ({ x, y, series: s.name })));
      return Plot.plot(base({
        height: 300, marginLeft: 70, marginRight: 44, marginBottom: 42,
        x: { label: c.x, labelOffset: 36, grid: true, ...(c.logX ? { type: "log", tickFormat: power, ticks: 6 } : {}) },
        y: { label: c.y, grid: true, zero: c.zero ?? false, ...(c.log ? { type: "log", tickFormat: power, ticks: 6 } : {}) },
        marks: [
          Plot.line(points, { x: "x", y: "y", stroke: "series", tip: true }),
          ...(points.length < 100 ? [Plot.dot(points, { x: "x", y: "y", fill: "series", r: 3 })] : []),
        ],
      }));
    },
    timeline: (c) => {
      const lanes = named([...new Set(c.rows.map((r) => r.row))], 24);
      const [begin, end] = c.rows.reduce(([b, e], r) => [Math.min(b, r.start), Math.max(e, r.end)], [Infinity, -Infinity]);
      const perUnit = (wide() - lanes.marginLeft - 20) / (end - begin);
      const widths = c.rows.map((r) => (r.end - r.start) * perUnit).sort((a, b) => a - b);
      const usual = widths[widths.length >> 1]; // CSS pixels of a block: what is narrow has no outline, and no number
      const numbered = c.rows.filter((r) => r.short && (r.end - r.start) * perUnit > 4 + 6 * r.short.length);
      return Plot.plot(base({
        height: 58 + lanes.rows, marginLeft: lanes.marginLeft, marginBottom: 34,
        x: { label: c.unit, grid: true, ticks: wide() / 90, domain: [begin, end] }, y: lanes.y,
        marks: [
          Plot.barX(c.rows, { x1: "start", x2: "end", y: "row", fill: "kind", ...lanes.inset, tip: true,
            ...(usual > 4 ? { stroke: "var(--paper)", strokeWidth: 0.5 } : {}),
            title: (r) => `${r.label}: ${r.start.toPrecision(4)} to ${r.end.toPrecision(4)}` }),
          ...lanes.marks,
          ...(c.labelled ? [Plot.text(numbered, { x: (r) => (r.start + r.end) / 2, y: "row", text: "short", dy: lanes.dy, fill: "#000000", fontSize: 10 })] : []),
        ],
      }));
    },
  };

  const draw = () => {
    const data = JSON.parse(document.getElementById("data").textContent);
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      const chart = data.charts.find((c) => c.id === figure.dataset.chart);
      figure.replaceChildren(drawn[chart.kind](chart));
    }
  };
  draw();
  globalThis.drawCharts = draw; // the page of `phalanx ui` draws each new answer
  // On paper nothing can be opened or hovered over: charts take its width, and numbers that fit stand below them.
  const opened = [];
  addEventListener("beforeprint", () => {
    printing = true;
    for (const details of document.querySelectorAll("details:not([open])")) {
      if (details.querySelectorAll("tr").length <= 40) { details.open = true; opened.push(details); }
    }
    draw();
  });
  addEventListener("afterprint", () => {
    printing = false;
    for (const details of opened.splice(0)) details.open = false;
    draw();
  });
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 150); });
})();
