
// A timeline of the last 200 steps: what was in each, and how long it took.

const STEPS = 200;
let chosenStep = null;

views.push({ name: "steps", title: "Steps", build: buildSteps, shown: drawSteps });

const KINDS = { decode: [1, "decode"], extend: [2, "prefill"], mixed: [3, "prefill and decode"], ahead: [4, "decode with tokens ahead"], other: [5, "other"] };

function buildSteps(panel) {
  const chart = svg("svg", { class: "steps", id: "steps-chart", viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "group", tabindex: 0, "aria-label": "Timeline of steps. The arrow keys choose a step." });
  chart.addEventListener("keydown", (pressed) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[pressed.key];
    if (!by || !live.steps.length) return;
    pressed.preventDefault();
    const place = live.steps.findIndex((step) => step.number === chosenStep);
    chosenStep = live.steps[Math.min(live.steps.length - 1, Math.max(0, place < 0 ? live.steps.length - 1 : place + by))].number;
    drawSteps();
  });
  panel.append(
    el("section", { class: "card" }, el("h2", null, "The last 200 steps"),
      el("p", { class: "mute small" }, "Each bar is a step, and its height the step's duration. Steps are recorded only while this page is open."),
      chart, el("div", { id: "steps-key" }), el("div", { id: "step-told", "aria-live": "polite" })),
    styled(el("section", { class: "card" }, el("h2", null, "The newest 25"), el("div", { class: "wide", id: "steps-table" })), { marginTop: "1rem" }));
}

function kindOf(step) {
  if (step.ahead) return "ahead";
  if (step.decoding === step.requests) return step.mode === "decode" ? "decode" : "other";
  return step.decoding ? "mixed" : "extend";
}

function tookSteps(rows) {
  for (const [number, mode, began, ended, requests, decoding, prompts, ahead, gained] of rows || []) {
    const last = live.steps[live.steps.length - 1];
    if (last && number <= last.number) continue;
    live.steps.push({ number, mode, began, ended, requests, decoding, prompts, ahead, gained });
  }
  live.steps.splice(0, Math.max(0, live.steps.length - STEPS));
}

function drawSteps() {
  if (current.name !== "steps") return;
  const steps = live.steps;
  if (!steps.length) {
    at("step-told").replaceChildren(el("p", { class: "empty" }, "No steps yet: no request is running."));
    return;
  }
  const longest = Math.max(...steps.map((step) => step.ended - step.began), 1e-6);
  const wide = 1000 / STEPS;
  at("steps-chart").replaceChildren(...steps.map((step, place) => {
    const high = Math.max(1.5, 98 * (step.ended - step.began) / longest);
    const bar = svg("rect", { x: place * wide, y: 100 - high, width: wide * 0.85, height: high, class: `f${KINDS[kindOf(step)][0]}${step.number === chosenStep ? " chosen" : ""}` });
    bar.addEventListener("click", () => { chosenStep = step.number; drawSteps(); });
    bar.append(svg("title", {}, told(step)));
    return bar;
  }));
  const counts = {};
  for (const step of steps) counts[kindOf(step)] = (counts[kindOf(step)] || 0) + 1;
  at("steps-key").replaceChildren(legend(Object.entries(counts).map(([kind, count]) => [...KINDS[kind], number(count)])));
  const chosen = steps.find((step) => step.number === chosenStep) || steps[steps.length - 1];
  at("step-told").replaceChildren(el("dl", { class: "facts eight" }, facts(chosen).map(([title, value]) => el("div", null, el("dt", null, title), el("dd", null, value)))));
  const rows = steps.slice(-25).reverse().map((step) => cells([
    { class: "num", value: number(step.number) }, KINDS[kindOf(step)][1], { class: "num", value: duration(step.ended - step.began) },
    { class: "num", value: number(step.requests) }, { class: "num", value: number(step.prompts) }, { class: "num", value: number(step.ahead) }, { class: "num", value: number(step.gained) }]));
  const heads = ["step", "kind", "duration", "requests", "prompt tokens", "tokens ahead", "new tokens"];
  at("steps-table").replaceChildren(el("table", null, el("thead", null, cells(heads.map((value, place) => ({ value, class: place === 1 ? "" : "num" })), "th")), el("tbody", null, rows)));
}

function facts(step) {
  return [["step", number(step.number)], ["kind", KINDS[kindOf(step)][1]], ["duration", duration(step.ended - step.began)], ["requests", number(step.requests)],
    ["decoding requests", number(step.decoding)], ["prompt tokens", number(step.prompts)], ["tokens ahead", number(step.ahead)], ["new tokens", number(step.gained)]];
}

const told = (step) => facts(step).map(([title, value]) => `${title}: ${value}`).join("\n");
