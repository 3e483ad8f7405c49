
// Lines over time, and bars of shares.

const WIDTH = 600, HEIGHT = 100;

// One chart of several series: `lines` is [{title, kind, values}], all as long as `times`.
function lineChart(node, times, lines, unit) {
  const top = Math.max(1e-9, ...lines.flatMap((line) => line.values));
  const first = times[0], span = Math.max(1e-9, times[times.length - 1] - first);
  const x = (time) => ((time - first) / span) * WIDTH;
  const y = (value) => HEIGHT - 2 - (value / top) * (HEIGHT - 8);
  const parts = [svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 })];
  for (const { kind, values } of lines) {
    if (values.length < 2) continue;
    const path = values.map((value, place) => `${place ? "L" : "M"}${x(times[place]).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    parts.push(svg("path", { class: `area f${kind}`, d: `${path}L${WIDTH} ${HEIGHT}L0 ${HEIGHT}Z` }));
    parts.push(svg("path", { class: `line s${kind}`, d: path }));
  }
  const last = lines.map((line) => `${line.title} ${number(line.values[line.values.length - 1], 1)}`).join(", ");
  const chart = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${last} ${unit}` });
  chart.append(...parts);
  node.replaceChildren(chart, legend(lines.map((line) => [line.kind, line.title, `${number(line.values[line.values.length - 1], 1)} ${unit}`])),
    el("div", { class: "mute small" }, `last ${number(span)} s, maximum ${number(top, 1)} ${unit}`));
}

function legend(entries) {
  return el("div", { class: "key" }, entries.map(([kind, title, value]) => el("span", null, el("i", { class: `f${kind}` }), `${title} `, el("b", null, value))));
}

// `shares` is [[kind, title, amount]]; what is left of `total` is empty.
function shareBar(shares, total, unit) {
  const all = Math.max(1, total);
  return [
    el("div", { class: "bar", role: "img", "aria-label": shares.map(([, title, amount]) => `${title} ${percent(amount / all)}`).join(", ") },
      shares.map(([kind, title, amount]) => styled(el("i", { class: `f${kind}`, title }), { width: `${(100 * amount) / all}%` }))),
    legend(shares.map(([kind, title, amount]) => [kind, title, `${number(amount)} ${unit} (${percent(amount / all)})`])),
  ];
}
