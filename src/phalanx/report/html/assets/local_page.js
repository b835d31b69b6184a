// Asks the server for a plan whenever a control changes. One question is under way at a time; of those that wait, the
// latest is asked next.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const tab = crypto.getRandomValues(new Uint32Array(2)).join("-");
  const powers = ["gpus", "batch", "seq"];
  let count = 0, asked = null, waiting = false, latest = null, kept = null, ended = false;

  const question = () => ({
    model: $("model").value, cluster: $("cluster").value, stack: $("stack").value, where: $("where").value,
    headroom: Number($("headroom").value) / 100, ...Object.fromEntries(powers.map((p) => [p, 2 ** Number($(p).value)])),
  });
  const show = () => {
    for (const p of powers) $(`${p}-shown`).textContent = (2 ** Number($(p).value)).toLocaleString("en");
    $("headroom-shown").textContent = `${$("headroom").value} %`;
  };
  const problem = (text) => { $("problem").textContent = text; $("problem").hidden = !text; };
  const gone = () => {
    ended = true;
    problem("The server has ended. Start `phalanx ui` again and open the address that it prints; what is below is from before.");
  };
  const post = (what, content) =>
    fetch(what, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) });

  const ask = async () => {
    show();
    if (asked) { waiting = true; return; }
    const mine = `${tab}.${++count}`, begin = performance.now();
    asked = mine;
    $("stop").disabled = false;
    const clock = setInterval(() => {
      const s = (performance.now() - begin) / 1000;
      if (s > 0.5) $("state").textContent = `searching: ${s.toFixed(0)} s so far`;
    }, 250);
    try {
      const answer = await (await post("plan", { ...question(), id: mine })).json();
      if (answer.error) { problem(answer.error); $("state").textContent = ""; } else { problem(""); shown(answer); }
      if (!answer.error) $("state").textContent = `answered in ${Math.round(performance.now() - begin)} ms`;
    } catch { gone(); $("state").textContent = ""; }
    clearInterval(clock);
    asked = null;
    $("stop").disabled = true;
    if (waiting) { waiting = false; ask(); }
  };
  const shown = (answer) => {
    latest = answer;
    $("main").innerHTML = answer.html; // escaped by the server, and no script in it runs
    $("data").textContent = JSON.stringify({ charts: answer.charts });
    drawCharts();
    for (const id of ["keep", "plan", "report"]) $(id).disabled = false;
    compare();
  };
  const compare = () => {
    if (!kept) return;
    const names = [...new Set([...Object.keys(kept.figures), ...Object.keys(latest.figures)])];
    const table = document.createElement("table");
    const row = (cells, kind) => {
      const tr = table.insertRow();
      for (const cell of cells) { const c = document.createElement(kind); c.textContent = cell; tr.append(c); }
    };
    row(["", "kept", "now"], "th");
    for (const n of names) row([n, kept.figures[n] ?? "", latest.figures[n] ?? ""], "td");
    $("compared").replaceChildren(table);
  };
  const save = (name, type, text) => {
    const a = document.createElement("a");
    a.href = URL.createObjectURL(new Blob([text], { type }));
    a.download = name;
    a.click();
    setTimeout(() => URL.revokeObjectURL(a.href), 1000);
  };

  let pause = 0;
  $("question").addEventListener("input", () => { show(); clearTimeout(pause); pause = setTimeout(ask, 60); });
  $("question").addEventListener("submit", (e) => { e.preventDefault(); ask(); });
  $("stop").addEventListener("click", () => post("stop", { id: asked }).catch(gone));
  $("keep").addEventListener("click", () => { kept = latest; compare(); });
  $("plan").addEventListener("click", () => save("plan.json", "application/json", latest.plan));
  $("report").addEventListener("click", async () => {
    try { save("report.html", "text/html", await (await fetch(`report?${latest.id}`)).text()); } catch { gone(); }
  });
  $("runs").addEventListener("change", () => look());

  const look = () => {
    if (!$("runs").value) { $("run").replaceChildren(); return; }
    const frame = document.createElement("iframe");
    frame.title = "the run's report";
    frame.src = `run?${encodeURIComponent($("runs").value)}`;
    $("run").replaceChildren(frame);
  };
  let changed = "";
  const watch = async () => {
    try {
      const runs = await (await fetch("runs")).json();
      if (ended) { ended = false; problem(""); }
      const names = [...$("runs").options].map((o) => o.value).filter(Boolean);
      if (names.join("/") !== runs.map((r) => r.name).join("/")) {
        const chosen = $("runs").value;
        $("runs").replaceChildren(new Option("choose a run", ""), ...runs.map((r) => new Option(r.name, r.name)));
        if (runs.some((r) => r.name === chosen)) $("runs").value = chosen;
      }
      const now = runs.find((r) => r.name === $("runs").value), state = now ? `${now.name} ${now.changed}` : "";
      if (state && changed.startsWith(`${now.name} `) && state !== changed) look();
      changed = state;
    } catch { gone(); }
    setTimeout(watch, 2000);
  };
  ask();
  watch();
})();
