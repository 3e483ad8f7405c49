
// The radix tree: the largest runs of cached tokens, each below the nearest one before it.

const CACHE_EVERY_MS = 3000;
let cacheTimer = null;

views.push({ name: "cache", title: "Cache", build: buildCache, shown: learnCache });

function buildCache(panel) {
  panel.append(el("section", { class: "card" },
    el("div", { class: "row spread" }, el("h2", null, "Prefix cache"), el("div", { class: "row" }, el("span", { class: "mute small", id: "cache-about" }), el("button", { type: "button", id: "cache-refresh", onclick: learnCache }, "Refresh"))),
    el("p", { class: "mute small" }, "The 200 largest nodes, each below its nearest ancestor in the list. The page never gets their tokens, because they belong to clients."),
    el("div", { class: "wide", id: "tree" }, el("p", { class: "empty" }, "No data yet."))));
}

async function learnCache() {
  clearTimeout(cacheTimer);
  if (current.name !== "cache") return;
  try {
    drawCache(await (await ask("console/runs")).json());
  } catch (error) {
    if (error.status && error.status < 500) return;
  }
  clearTimeout(cacheTimer);
  cacheTimer = setTimeout(() => { if (!document.hidden) learnCache(); }, CACHE_EVERY_MS);
}

// The places of runs in the order of a tree, each with its depth.
function inOrder(runs) {
  const below = new Map();
  runs.forEach((run, place) => below.set(run.above, [...(below.get(run.above) || []), place]));
  const found = [], stack = (below.get(-1) || []).reverse().map((place) => [place, 0]);
  while (stack.length) {
    const [place, depth] = stack.pop();
    found.push([place, depth]);
    for (const child of (below.get(place) || []).reverse()) stack.push([child, depth + 1]);
  }
  return found;
}

function drawCache({ runs, cached_tokens: cached, page_size: page }) {
  const shown = runs.reduce((sum, run) => sum + run.on_device, 0);
  at("cache-about").textContent = `${number(cached)} tokens on the device, ${number(shown)} of them in the ${number(runs.length)} nodes below; page size ${page}`;
  if (!runs.length) {
    at("tree").replaceChildren(el("p", { class: "empty" }, cached ? "This cache does not describe its nodes." : "The cache is empty."));
    return;
  }
  const largest = Math.max(...runs.map((run) => run.tokens)), hits = Math.max(1, ...runs.map((run) => run.hits));
  const rows = inOrder(runs).map(([place, depth]) => {
    const run = runs[place];
    const name = styled(el("div", null, `${number(run.start)} – ${number(run.start + run.tokens)}`,
      styled(el("div", { class: run.on_device ? "meter" : "meter kept" }), { width: `${Math.max(1, 100 * run.tokens / largest)}%`, opacity: 0.35 + 0.65 * run.hits / hits })), { paddingLeft: `${Math.min(depth, 12)}rem` });
    return cells([name, { class: "num", value: number(run.tokens) }, { class: "num", value: number(run.hits) },
      el("span", null, run.locked ? el("span", { class: "tag" }, "in use") : "", run.on_device < run.tokens ? el("span", { class: "tag" }, run.on_device ? "partly on the device" : "off the device") : "")]);
  });
  at("tree").replaceChildren(el("table", { class: "tree" }, el("thead", null, cells(["positions", { value: "tokens", class: "num" }, { value: "hits", class: "num" }, ""], "th")), el("tbody", null, rows)));
}
