
// Figures as they change, from the stream of events.

const LOOKS = 240;  // two minutes
const live = { looks: [], steps: [], started: 0, dropped: 0, listeners: [], stats: null, model: {} };

views.push({ name: "live", title: "Live", build: buildLive, shown: drawLive });

const TILES = [
  ["out", "tokens/s generated"], ["in", "prompt tokens/s"], ["running", "running"], ["waiting", "waiting"],
  ["hits", "prefix cache hit rate"], ["kv", "KV memory in use"], ["step", "mean step"], ["finished", "finished"],
];

function buildLive(panel) {
  panel.append(
    el("div", { class: "tiles eight" }, TILES.map(([name, title]) => el("div", { class: "tile" }, el("b", { id: `tile-${name}` }, "–"), el("span", null, title)))),
    el("div", { class: "grid two" },
      el("section", { class: "card" }, el("h2", null, "Tokens"), el("div", { id: "chart-tokens" })),
      el("section", { class: "card" }, el("h2", null, "Requests"), el("div", { id: "chart-requests" })),
      el("section", { class: "card" }, el("h2", null, "KV memory"), el("div", { id: "kv" })),
      el("section", { class: "card" }, el("h2", null, "Totals"), el("dl", { class: "facts", id: "totals" }))),
    el("details", { class: "card" }, el("summary", null, "All figures of the scheduler"), el("div", { class: "wide", id: "figures" })));
  styled(panel.lastChild, { marginTop: "1rem" });
}

// The rates between two looks.
function rates(before, after) {
  const took = Math.max(1e-6, after.now - before.now);
  const grown = (name) => Math.max(0, (after.stats[name] || 0) - (before.stats[name] || 0));
  const computed = grown("prompt_tokens"), found = grown("cached_tokens");
  return { out: grown("generated_tokens") / took, in: computed / took, hits: computed + found ? found / (computed + found) : NaN };
}

function took(look) {
  if (look.started !== live.started) {
    if (live.started) notice("The scheduler was restarted. Requests that were running have failed, and all figures start from zero.");
    Object.assign(live, { looks: [], steps: [], started: look.started });
  }
  live.stats = look.stats;
  live.looks.push({ now: look.now, stats: look.stats });
  if (live.looks.length > LOOKS) live.looks.shift();
  tookSteps(look.steps);
  setState(look.stats.paused ? "paused" : "live", look.stats.paused ? "paused" : "live");
  drawLive();
  drawSteps();
}

function drawLive() {
  if (!live.stats || current.name !== "live") return;
  const { stats, looks } = live;
  const about = looks.slice(-5);
  const now = about.length > 1 ? rates(about[0], about[about.length - 1]) : { out: 0, in: 0, hits: NaN };
  const used = (stats.held_tokens || 0) + (stats.locked_tokens || 0);
  const steps = live.steps.slice(-50);
  const set = (name, text) => { at(`tile-${name}`).textContent = text; };
  set("out", number(now.out, 1));
  set("in", number(now.in));
  set("running", number(stats.running_requests));
  set("waiting", number(stats.waiting_requests + (stats.blocked_requests || 0)));
  set("hits", percent(stats.cached_tokens / (stats.cached_tokens + stats.prompt_tokens)));
  set("kv", percent(used / stats.total_tokens));
  set("step", steps.length ? duration(steps.reduce((sum, step) => sum + step.ended - step.began, 0) / steps.length) : "–");
  set("finished", number(stats.finished));
  const pairs = looks.slice(1).map((look, place) => rates(looks[Math.max(0, place - 2)], look));
  const times = looks.slice(1).map((look) => look.now);
  if (times.length > 1) {
    lineChart(at("chart-tokens"), times, [
      { title: "generated", kind: 1, values: pairs.map((pair) => pair.out) },
      { title: "prompt", kind: 2, values: pairs.map((pair) => pair.in) }], "tokens/s");
    lineChart(at("chart-requests"), times, [
      { title: "running", kind: 1, values: looks.slice(1).map((look) => look.stats.running_requests) },
      { title: "waiting", kind: 2, values: looks.slice(1).map((look) => look.stats.waiting_requests) }], "");
  }
  drawMemory(stats, used);
  drawTotals(stats);
  if (at("figures").parentNode.open) drawFigures(stats);
}

function drawMemory(stats, used) {
  const parts = [el("h3", null, `Device: ${number(stats.total_tokens)} tokens`),
    ...shareBar([[1, "running requests", used], [2, "cached, evictable", stats.cached_tokens_now - stats.locked_tokens], [0, "free", stats.free_tokens]], stats.total_tokens, "tokens")];
  const tiers = stats.tiers || {};
  const sizes = { host: ["host_tokens", "host_free_tokens"], storage: ["storage_tokens", "storage_free_tokens"] };
  for (const [name, [have, free]] of Object.entries(sizes)) {
    if (tiers[have] === undefined) continue;
    const all = tiers[have] + (tiers[free] || 0) || tiers[have];
    const kept = name === "host" && tiers[free] !== undefined ? tiers[have] : all;
    parts.push(el("h3", null, `${name === "host" ? "Host" : "Storage"}: ${number(all)} tokens`), ...shareBar([[3, "kept", kept], [0, "free", tiers[free] || 0]], all, "tokens"));
  }
  at("kv").replaceChildren(...parts);
}

function drawTotals(stats) {
  const facts = [
    ["accepted", stats.accepted], ["rejected", stats.rejected], ["aborted", stats.aborted], ["retractions", stats.retractions],
    ["tokens generated", stats.generated_tokens], ["prompt tokens computed", stats.prompt_tokens], ["prompt tokens cached", stats.cached_tokens],
    ["failed batches", stats.failed_batches],
    ...(stats.encode_steps ? [["encoder steps", stats.encode_steps], ["encoder seconds", stats.encode_time]] : []), ["plugin failures", stats.plugin_failures],
    ["events this page missed", live.dropped],
  ];
  at("totals").replaceChildren(...facts.map(([title, value]) => el("div", null, el("dt", null, title), el("dd", null, number(value, 2)))));
}

function leaves(value, path, found) {
  if (value !== null && typeof value === "object" && Object.keys(value).length) {
    for (const [name, below] of Object.entries(value)) leaves(below, path ? `${path}.${name}` : name, found);
  } else found.push([path, value]);
  return found;
}

function drawFigures(stats) {
  const rows = leaves(stats, "", []).map(([path, value]) => cells([named(path), { class: "num", value: typeof value === "number" ? number(value, 4) : JSON.stringify(value) }]));
  at("figures").replaceChildren(el("table", null, el("tbody", null, rows)));
}

// ---- the stream ---------------------------------------------------------------------------------------------------

const ADMIN_VIEWS = ["live", "cache", "steps", "config", "plugins"];
let watching = null, problem = "";

// A notice that goes away when the scheduler answers again.
function trouble(text) {
  problem = text;
  notice(text);
}

async function watch() {
  if (watching) watching.abort();
  const mine = watching = new AbortController();
  let wait = 0.5;
  while (mine === watching) {
    try {
      for await (const [name, data] of events("console/events", { signal: mine.signal })) {
        if (mine !== watching) return;
        wait = 0.5;
        if (name === "look" && !["live", "paused"].includes(at("state").dataset.state)) onLive();
        heard(name, JSON.parse(data));
      }
      setState("gone", "no connection");
    } catch (error) {
      if (mine !== watching) return;
      if (error.status === 401 || error.status === 403) {
        setState("closed", error.status === 401 ? "needs a key" : "chat only");
        return closed(error);
      }
      setState("gone", "no connection");
      trouble(error.status ? error.message : "The server does not answer. The page tries again.");
    }
    await new Promise((done) => setTimeout(done, 1000 * wait));
    wait = Math.min(4, 2 * wait);
  }
}

function heard(name, data) {
  if (name === "look") took(data);
  else if (name === "steps") tookSteps(data.steps);
  else if (name === "dropped") live.dropped = data.dropped;
  else if (name === "state") {
    setState(data.state, { down: "restarting", busy: "busy", stopping: "stopping" }[data.state] || data.state);
    if (data.state !== "busy") trouble(data.state === "down" ? `The scheduler is not running, and the server restarts it: ${data.message}` : data.message);
  }
}

// The scheduler answers (again).
function onLive() {
  if (problem && at("notice-text").textContent === problem) notice("");
  problem = "";
  for (const name of ADMIN_VIEWS) views.find((view) => view.name === name).panel.querySelector(".closed")?.remove();
  learnModels();
  learnAbout();
}

function closed(error) {
  for (const name of ADMIN_VIEWS) {
    const panel = views.find((view) => view.name === name).panel;
    panel.querySelector(".closed")?.remove();
    panel.prepend(el("p", { class: "card closed" }, error.status === 401 ? "This view needs the admin key." : `This view needs the admin key: ${error.message}.`,
      " ", el("button", { type: "button", onclick: () => { key.ask(); at("key").focus(); } }, "Enter a key")));
  }
}
