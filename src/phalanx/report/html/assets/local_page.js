// Asks the server for a plan whenever a control changes. A tab has one question under way at a time; of those that
// wait, the latest is asked next, and a search that takes longer than a second is stopped for it. The question stands in the address, so that a tab may be reloaded or shared.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const tab = crypto.getRandomValues(new Uint32Array(2)).join("-");
  const names = ["model", "cluster", "stack"], amounts = ["gpus", "batch", "seq"];
  let count = 0, asked = null, waiting = false, latest = null, kept = null, ended = false;

  const question = () => ({
    ...Object.fromEntries(names.map((n) => [n, $(n).value])),
    ...Object.fromEntries(amounts.map((n) => [n, $(n).value === "" ? null : Number($(n).value)])),
    where: $("where").value, headroom: Number($("headroom").value) / 100,
  });
  const restore = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const n of names) if (given.has(n)) {
      const known = [...$(n).options].some((o) => o.value === given.get(n));
      if (!known) $(n).prepend(new Option(given.get(n))); // the server says what is wrong with it
      $(n).value = given.get(n);
    }
    for (const n of [...amounts, "where"]) if (given.has(n)) $(n).value = given.get(n);
    if (given.has("headroom")) $("headroom").value = 100 * Number(given.get("headroom"));
  };
  const show = () => {
    for (const n of amounts) if (Number($(n).value) > 0) $(`${n}-power`).value = Math.log2(Number($(n).value));
    $("headroom-shown").textContent = `${$("headroom").value} %`;
  };
  const problem = (text) => { $("problem").textContent = text; $("problem").hidden = !text; };
  const old = (is) => { for (const id of ["main", "figures", "compared"]) $(id).classList.toggle("old", is); };
  const gone = () => {
    ended = true;
    problem("The server has ended. Start `phalanx ui` again and open the address that it prints; what is below is from before.");
    old(true);
  };
  const post = (what, content) =>
    fetch(what, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) });

  const ask = async () => {
    show();
    if (asked) { waiting = true; return; }
    const mine = `${tab}.${++count}`, begin = performance.now(), q = question();
    history.replaceState(null, "", `#${new URLSearchParams(Object.entries(q).filter(([, v]) => v !== null && v !== ""))}`);
    asked = mine;
    let superseded = false;
    const clock = setInterval(() => {
      const s = (performance.now() - begin) / 1000;
      if (waiting && s >= 1 && !superseded) {
        superseded = true;
        post("stop", { id: mine }).catch(gone);
      }
      $("searching").hidden = s < 0.4;
      $("stop").disabled = s < 0.4;
      if (s >= 0.4) old(latest !== null); // what is shown answers another question
      if (s >= 0.5) $("state").textContent = `searching: ${s.toFixed(1)} s so far${far}`;
    }, 100);
    let far = "";
    const pulse = setInterval(async () => { // a search that takes long says how far it is
      const p = await fetch(`progress?${mine}`).then((r) => r.json()).catch(() => null);
      if (p) far = `, ${p.priced.toLocaleString("en")} of ${p.legal.toLocaleString("en")} strategies priced, others bounded`;
    }, 500);
    try {
      const answer = await (await post("plan", { ...q, id: mine })).json();
      if (answer.error === "stopped") { $("state").textContent = "stopped"; old(latest !== null); }
      else if (answer.error) { problem(answer.error); $("state").textContent = ""; old(true); }
      else { problem(""); old(false); shown(answer); $("state").textContent = `answered in ${Math.round(performance.now() - begin)} ms`; }
    } catch { gone(); $("state").textContent = ""; }
    clearInterval(clock);
    clearInterval(pulse);
    asked = null;
    $("stop").disabled = true;
    $("searching").hidden = true;
    if (waiting) { waiting = false; ask(); }
  };
  const shown = (answer) => {
    latest = answer;
    const open = [...$("main").querySelectorAll("details[open]")].map((d) => d.closest("section").id);
    $("main").innerHTML = answer.html; // escaped by the server, and no script in it runs
    for (const id of open) $(id)?.querySelector("details")?.setAttribute("open", "");
    $("figures").replaceChildren(...["strategy", "step", "tokens/s", "MFU", "memory"].map((name) => {
      const box = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = name; dd.textContent = answer.figures[name];
      box.append(dt, dd);
      box.classList.toggle("long", name === "strategy");
      return box;
    }));
    for (const id of ["keep", "plan", "report", "export"]) $(id).disabled = false;
    compare();
  };
  const compare = () => {
    if (!kept) return;
    const rows = [...new Set([...Object.keys(kept.figures), ...Object.keys(latest.figures)])];
    const table = document.createElement("table"), head = table.createTHead(), body = table.createTBody();
    const row = (part, kind, cells) => {
      const tr = part.insertRow();
      for (const cell of cells) { const c = document.createElement(kind); c.textContent = cell; tr.append(c); }
      return tr;
    };
    row(head, "th", ["", "kept", "now"]);
    for (const n of rows) {
      const a = kept.figures[n] ?? "", b = latest.figures[n] ?? "";
      row(body, "td", [n, a, b]).classList.toggle("differs", a !== b);
    }
    $("compared").replaceChildren(table);
  };
  const save = (name, type, content) => {
    const a = document.createElement("a");
    a.href = URL.createObjectURL(new Blob([content], { type }));
    a.download = name;
    a.click();
    setTimeout(() => URL.revokeObjectURL(a.href), 1000);
  };

  let pause = 0;
  $("question").addEventListener("input", (e) => {
    if (e.target.id === "export") return; // it asks nothing new
    const slid = e.target.id.endsWith("-power") && e.target.id.slice(0, -6);
    if (slid) $(slid).value = 2 ** Number(e.target.value);
    show();
    clearTimeout(pause);
    pause = setTimeout(ask, e.target.type === "text" ? 400 : 60); // a condition is typed letter by letter
  });
  $("question").addEventListener("submit", (e) => { e.preventDefault(); clearTimeout(pause); ask(); });
  $("stop").addEventListener("click", () => { waiting = false; post("stop", { id: asked }).catch(gone); });
  $("keep").addEventListener("click", () => { kept = latest; compare(); });
  $("plan").addEventListener("click", () => save("plan.json", "application/json", latest.plan));
  $("report").addEventListener("click", async () => {
    try {
      const reply = await fetch(`report?${latest.id}`);
      if (reply.ok) save("report.html", "text/html", await reply.text());
      else problem("That report is no longer kept: change a control and change it back.");
    } catch { gone(); }
  });

  $("export").addEventListener("change", async (e) => {
    e.stopPropagation();
    const to = $("export").value;
    $("export").value = "";
    if (!to || !latest) return;
    try {
      const reply = await fetch(`export?${latest.id}&${to}`);
      if (reply.headers.get("Content-Type") === "application/zip") {
        problem("");
        save(`${to}.zip`, "application/zip", await reply.arrayBuffer());
      } else problem(reply.ok ? (await reply.json()).error : "That plan is no longer kept: change a control and change it back.");
    } catch { gone(); }
  });

  const choose = (runs) => {
    $("trained").hidden = !runs;
    $("planned").hidden = runs;
    $("to-runs").setAttribute("aria-selected", runs);
    $("to-plan").setAttribute("aria-selected", !runs);
    if (runs) look();
  };
  $("to-plan").addEventListener("click", () => choose(false));
  $("to-runs").addEventListener("click", () => choose(true));
  $("runs").addEventListener("change", () => look());

  const look = () => {
    if (!$("runs").value) { $("run").replaceChildren(); return; }
    const frame = document.createElement("iframe");
    frame.title = "the run's report";
    frame.src = `run?${encodeURIComponent($("runs").value)}`;
    frame.addEventListener("load", () => { // the pages before stay until this one is drawn, and their place with it
      const y = scrollY;
      while (frame.previousSibling) frame.previousSibling.remove();
      const fit = () => { if (frame.contentDocument) frame.style.height = `${frame.contentDocument.documentElement.offsetHeight + 40}px`; };
      fit();
      new ResizeObserver(fit).observe(frame.contentDocument.body);
      scrollTo(0, y);
    });
    $("run").append(frame);
  };
  let changed = "";
  const watch = async () => {
    try {
      const { folder, runs, rest } = await (await fetch("runs")).json();
      if (ended) { ended = false; problem(""); ask(); }
      const chosen = $("runs").value, there = [...$("runs").options].map((o) => o.value).join("/");
      if (there !== runs.map((r) => r.name).join("/")) {
        $("runs").replaceChildren(...runs.map((r) => new Option(r.name, r.name)));
        if (runs.some((r) => r.name === chosen)) $("runs").value = chosen;
      }
      $("no-runs").textContent = rest ? `${rest} older folders of ${folder} are not looked into.` : `No run lies in ${folder} yet: phalanx train JOB.toml makes one, and it appears here.`;
      $("no-runs").hidden = runs.length > 0 && !rest;
      const now = runs.find((r) => r.name === $("runs").value), state = now ? `${now.name} ${now.changed}` : "";
      if (state !== changed && !$("trained").hidden) look();
      changed = state;
    } catch { gone(); }
    setTimeout(watch, 2000);
  };
  restore();
  ask();
  watch();
})();
