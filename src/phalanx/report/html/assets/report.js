// Draws every chart of the page from the JSON in #data. Colours: Okabe and Ito 2008, told apart by the colour-blind.
"use strict";
(() => {
  const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];
  const wide = () => Math.max(320, Math.min(1080, document.getElementById("main").clientWidth - 8));
  const base = (more) => ({
    width: wide(), marginLeft: 150, style: { background: "transparent", color: "currentColor", fontSize: "12px" },
    color: { range: COLOURS, legend: true }, ...more,
  });
  const span = (values) => [Math.min(...values), Math.max(...values)];

  const left = (names) => Math.min(wide() * 0.4, 14 + 6.6 * Math.max(...names.map((n) => n.length)));
  const power = (v) => v >= 1 ? v.toLocaleString("en") : v.toPrecision(1);

  const drawn = {
    waterfall: (c) => {
      let at = 0;
      const bars = c.steps.map((s) => {
        const bar = { ...s, from: s.kind === "total" ? 0 : at, to: s.kind === "total" ? s.value : at + s.value };
        at = bar.to;
        return bar;
      });
      return Plot.plot(base({
        height: 40 + 26 * bars.length, marginLeft: left(bars.map((b) => b.name)), marginRight: 70,
        x: { label: c.unit, grid: true }, y: { label: null, domain: bars.map((b) => b.name) },
        marks: [
          Plot.barX(bars, { x1: "from", x2: "to", y: "name", fill: "kind", tip: true,
            title: (b) => `${b.name}: ${b.text ?? b.value}` }),
          Plot.text(bars, { x: "to", y: "name", text: "text", textAnchor: "start", dx: 4, fill: "currentColor" }),
          Plot.ruleX([0]),
        ],
      }));
    },
    stack: (c) => Plot.plot(base({
      height: 60 + 34 * new Set(c.bars.map((b) => b.bar)).size, marginLeft: left(c.bars.map((b) => b.bar)), marginRight: 60,
      x: { label: c.unit, grid: true }, y: { label: null, domain: [...new Set(c.bars.map((b) => b.bar))] },
      marks: [
        Plot.barX(c.bars, { x: "value", y: "bar", fill: "part", tip: true, title: (b) => `${b.part}: ${b.text ?? b.value}` }),
        ...(c.limit ? [
          Plot.ruleX([c.limit.value], { stroke: "#d55e00", strokeWidth: 2, strokeDasharray: "4 2" }),
          Plot.text([c.limit], { x: "value", text: "name", frameAnchor: "top", dy: -8, fill: "currentColor" }),
        ] : []),
        Plot.ruleX([0]),
      ],
      marginTop: 28,
    })),
    scatter: (c) => Plot.plot(base({
      height: 420, marginLeft: 70, marginRight: 44, marginBottom: 42,
      x: { label: c.x, labelOffset: 36, type: c.log ? "log" : "linear", grid: true, nice: true, ...(c.log ? { tickFormat: power, ticks: 6 } : {}) },
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
      const names = [...new Set(c.rows.map((r) => r.row))];
      return Plot.plot(base({
        height: 50 + 24 * names.length, marginLeft: left(names), x: { label: c.unit, grid: true, domain: span(c.rows.flatMap((r) => [r.start, r.end])) },
        y: { label: null, domain: names },
        marks: [
          Plot.barX(c.rows, { x1: "start", x2: "end", y: "row", fill: "kind", stroke: "var(--paper)", strokeWidth: 0.5, tip: true,
            title: (r) => `${r.label}: ${r.start.toPrecision(4)} to ${r.end.toPrecision(4)}` }),
          ...(c.labelled ? [Plot.text(c.rows, { x: (r) => (r.start + r.end) / 2, y: "row", text: "short", fill: "#000000", fontSize: 10 })] : []),
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
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 150); });
})();
