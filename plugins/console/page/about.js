
// The config with what set each key, the providers, and the plugins at each point.

const about = { config: [], points: [], providers: {}, model: {} };

views.push({ name: "config", title: "Config", build: buildConfig, shown: drawConfig });
views.push({ name: "plugins", title: "Plugins", build: buildPlugins, shown: drawPlugins });

async function learnAbout() {
  try {
    Object.assign(about, await (await ask("console/about")).json());
    drawConfig();
    drawPlugins();
  } catch { /* the stream of events says what is wrong */ }
}

function buildConfig(panel) {
  panel.append(
    el("section", { class: "card" }, el("h2", null, "Model"), el("dl", { class: "facts", id: "model-facts" })),
    styled(el("section", { class: "card" },
      el("div", { class: "row spread" }, el("h2", null, "Config"),
        el("div", { class: "row" }, el("label", { class: "small" }, el("input", { type: "checkbox", id: "only-set", onchange: drawConfig }), " only keys that are set"),
          el("input", { type: "search", id: "config-filter", placeholder: "Filter", "aria-label": "Filter the config", oninput: drawConfig }))),
      el("div", { class: "wide", id: "config-table" })), { marginTop: "1rem" }));
}

function drawConfig() {
  const { model } = about;
  const told = ["served_name", "path", "architecture", "dtype", "max_context_len", "max_total_tokens", "version"];
  at("model-facts").replaceChildren(...told.filter((name) => model[name] !== undefined).map((name) => el("div", null,
    el("dt", null, name.replaceAll("_", " ")), el("dd", null, typeof model[name] === "number" ? number(model[name]) : String(model[name])))));
  const wanted = at("config-filter").value.toLowerCase(), onlySet = at("only-set").checked;
  const rows = about.config.filter(([path, value, origin]) => (!onlySet || origin !== "default") && `${path} ${JSON.stringify(value)} ${origin}`.toLowerCase().includes(wanted));
  at("config-table").replaceChildren(rows.length ? el("table", null, el("thead", null, cells(["key", "value", "set by"], "th")),
    el("tbody", null, rows.map(([path, value, origin]) => {
      const row = cells([named(path), { class: "value mono", value: value === null ? "unset" : typeof value === "string" ? value : JSON.stringify(value) }, { class: "mute small", value: origin }]);
      if (origin !== "default") row.className = "set";
      return row;
    }))) : el("p", { class: "empty" }, about.config.length ? "No key matches." : "No data yet."));
}

function buildPlugins(panel) {
  panel.append(
    el("section", { class: "card" }, el("h2", null, "Providers"), el("div", { class: "wide", id: "providers" })),
    styled(el("section", { class: "card" },
      el("div", { class: "row spread" }, el("h2", null, "Hooks and stages"),
        el("select", { id: "by", "aria-label": "Order", onchange: drawPlugins }, el("option", { value: "point" }, "by point, in order"), el("option", { value: "plugin" }, "by plugin"))),
      el("p", { class: "mute small" }, "The points of the pipeline at which plugins run. Points that no plugin uses are left out, and so are the methods of FrontendStage and DevicePart."),
      el("div", { class: "wide", id: "points" })), { marginTop: "1rem" }));
}

function drawPlugins() {
  const chosen = Object.entries(about.providers);
  at("providers").replaceChildren(chosen.length ? el("table", null, el("thead", null, cells(["contract", "provider"], "th")),
    el("tbody", null, chosen.map(([contract, name]) => cells([named(contract), { class: "value", value: (Array.isArray(name) ? name.join(", ") : typeof name === "string" ? name : JSON.stringify(name)) || "–" }])))) : el("p", { class: "empty" }, "No data yet."));
  const points = about.points.filter((point) => point.listeners.length);
  let heads = ["point", "process", "plugins, in order", "called"], rows;
  if (at("by").value === "plugin") {
    const plugins = new Map();
    for (const point of points) for (const { plugin } of point.listeners) plugins.set(plugin, [...(plugins.get(plugin) || []), point.point]);
    heads = ["plugin", "points"];
    rows = [...plugins].sort().map(([plugin, where]) => cells([named(plugin), { class: "value", value: where.join(", ") }]));
  } else {
    rows = points.map((point) => cells([named(point.point), { class: "small", value: point.process }, { class: "value", value: point.listeners.map((one) => one.plugin).join(", ") }, { class: "mute small", value: point.when }]));
  }
  at("points").replaceChildren(rows.length ? el("table", null, el("thead", null, cells(heads, "th")), el("tbody", null, rows)) : el("p", { class: "empty" }, "No data yet."));
}
