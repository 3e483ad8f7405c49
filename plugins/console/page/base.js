
// What all views use: making elements, asking the server, and the views themselves.

const at = (id) => document.getElementById(id);

function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, props, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Styles are set by script: the page's policy refuses them in attributes.
function styled(node, styles) {
  Object.assign(node.style, styles);
  return node;
}

const number = (value, digits = 0) =>
  value === undefined || value === null || Number.isNaN(value) ? "–"
    : Number(value).toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
const percent = (share) => (Number.isFinite(share) ? `${number(100 * share, share < 0.1 ? 1 : 0)} %` : "–");
const duration = (seconds) =>
  seconds >= 1 ? `${number(seconds, 2)} s` : seconds >= 1e-3 ? `${number(seconds * 1e3, 1)} ms` : `${number(seconds * 1e6)} µs`;

// A name that may be broken after its dots and underscores, and nowhere else.
const named = (text) => el("code", null, text.split(/(?<=[._])/).flatMap((part, place) => (place ? [el("wbr"), part] : [part])));

function cells(row, kind = "td") {
  return el("tr", null, row.map((cell) => {
    const plain = cell === null || typeof cell !== "object" || cell instanceof Node;
    const { value, ...props } = plain ? { value: cell } : cell;
    return el(kind, props, value === undefined || value === null ? "" : value);
  }));
}

// ---- the server ---------------------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers(extra) {
  const found = { ...extra };
  if (key.value) found.authorization = `Bearer ${key.value}`;
  return found;
}

async function ask(path, { body, signal } = {}) {
  const options = { signal, headers: headers(body ? { "content-type": "application/json" } : {}), cache: "no-store" };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  let told = {};
  try { told = (await answer.json()).error || {}; } catch { /* it is not JSON */ }
  const refused = new Refused(answer.status, told.message || `${path}: ${answer.status}`, told.code);
  key.refused(refused);
  throw refused;
}

// The events of a stream, as [name, data]. `fetch` in place of EventSource, which sends no key.
async function* events(path, options) {
  const answer = await ask(path, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        let name = "message";
        const data = [];
        for (const line of part.split(/\r?\n/)) {
          if (line.startsWith("event:")) name = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        }
        if (data.length) yield [name, data.join("\n")];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// ---- views --------------------------------------------------------------------------------------------------------

const views = [];  // {name, title, build(panel), shown(), admin}
let current = null;

function show(name, focus = false) {
  current = views.find((view) => view.name === name) || views[0];
  for (const view of views) {
    const chosen = view === current;
    view.tab.setAttribute("aria-selected", chosen);
    view.tab.tabIndex = chosen ? 0 : -1;
    view.panel.hidden = !chosen;
  }
  if (focus) current.tab.focus();
  current.tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  if (location.hash !== `#${current.name}`) history.replaceState(null, "", `#${current.name}`);
  if (current.shown) current.shown();
}

function buildViews() {
  for (const view of views) {
    view.tab = el("button", {
      role: "tab", id: `tab-${view.name}`, "aria-controls": `panel-${view.name}`, type: "button", onclick: () => show(view.name),
    }, view.title);
    view.panel = el("section", {
      role: "tabpanel", id: `panel-${view.name}`, "aria-labelledby": `tab-${view.name}`, hidden: true,
    });
    at("tabs").append(view.tab);
    at("main").append(view.panel);
    view.build(view.panel);
  }
  at("tabs").addEventListener("keydown", (pressed) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[pressed.key];
    const place = views.indexOf(current);
    const next = pressed.key === "Home" ? 0 : pressed.key === "End" ? views.length - 1 : step && place + step;
    if (next === undefined) return;
    pressed.preventDefault();
    show(views[(next + views.length) % views.length].name, true);
  });
  addEventListener("hashchange", () => show(location.hash.slice(1)));
}

function notice(text) {
  at("notice-text").textContent = text;
  at("notice").hidden = !text;
}

at("notice-close").addEventListener("click", () => notice(""));

function setState(state, text) {
  at("state").dataset.state = state;
  at("state").textContent = text;
}
