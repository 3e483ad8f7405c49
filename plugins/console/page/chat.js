
// Chat through the OpenAI routes, with pictures and tools.

const chat = { messages: [], pictures: [], running: null, model: "" };

const EXAMPLE_TOOL = `[{"type": "function", "function": {
  "name": "get_weather",
  "description": "Current weather of a city",
  "parameters": {"type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"]}}}]`;

views.push({ name: "chat", title: "Chat", build: buildChat, shown: () => at("ask-text").focus({ preventScroll: true }) });

function buildChat(panel) {
  const file = el("input", { type: "file", accept: "image/*", multiple: true, hidden: true, id: "file",
    onchange: () => { addPictures(file.files); file.value = ""; } });
  const text = el("textarea", { id: "ask-text", rows: 2, "aria-label": "Message", placeholder: "Message. Enter sends, Shift+Enter starts a new line." });
  text.addEventListener("keydown", (pressed) => {
    if (pressed.key === "Enter" && !pressed.shiftKey && !pressed.isComposing) {
      pressed.preventDefault();
      sendText();
    }
    if (pressed.key === "Escape") stopChat();
  });
  text.addEventListener("paste", (pasted) => addPictures(pasted.clipboardData.files));
  const composer = el("form", { class: "composer", onsubmit: (sent) => { sent.preventDefault(); sendText(); } },
    el("div", { class: "pictures", id: "pictures" }), text, file,
    el("div", { class: "row spread" },
      el("div", { class: "row" },
        el("button", { type: "button", id: "add-picture", onclick: () => file.click() }, "Add picture"),
        el("button", { type: "button", class: "quiet", id: "clear", onclick: clearChat }, "New chat")),
      el("div", { class: "row" },
        el("span", { class: "mute small", id: "speed", "aria-live": "polite" }),
        el("button", { type: "button", id: "stop", hidden: true, onclick: stopChat }, "Stop"),
        el("button", { class: "main", id: "send" }, "Send"))));
  const talk = el("div", { class: "card talk" }, el("div", { class: "turns", id: "turns", "aria-live": "polite", tabindex: 0, "aria-label": "Conversation" }), composer);
  talk.addEventListener("dragover", (dragged) => dragged.preventDefault());
  talk.addEventListener("drop", (dropped) => { dropped.preventDefault(); addPictures(dropped.dataTransfer.files); });
  panel.append(el("div", { class: "chat" }, talk, buildSettings()));
  showTurns();
}

function buildSettings() {
  const field = (title, node) => el("label", null, title, node);
  return el("details", { class: "card settings", open: matchMedia("(min-width: 52rem)").matches }, el("summary", null, "Settings"),
    field("Model", el("select", { id: "chat-model" })),
    field("System prompt", el("textarea", { id: "system", rows: 2 })),
    field("Temperature (empty: model's default)", el("input", { id: "temperature", type: "number", min: 0, max: 2, step: 0.1 })),
    field("Max tokens (empty: no limit)", el("input", { id: "max-tokens", type: "number", min: 1, step: 1 })),
    field("Tools, as JSON", el("textarea", { id: "tools", class: "mono", spellcheck: "false" })),
    el("button", { type: "button", class: "quiet small", onclick: () => { at("tools").value = EXAMPLE_TOOL; } }, "Insert an example"));
}

async function learnModels() {
  try {
    const found = await (await ask("v1/models")).json();
    chat.model = found.data[0].id;
    const chosen = at("chat-model").value;
    at("chat-model").replaceChildren(...found.data.map((one) => el("option", { selected: one.id === chosen }, one.id)));
    at("model").textContent = chat.model;
    at("send").disabled = false;
    if (!chat.messages.length) showTurns();
  } catch (error) {
    at("send").disabled = error.status === 404;
    if (error.status === 404) showTurns("This server has no OpenAI API (apis: openai), which the chat uses.");
  }
}

function clearChat() {
  stopChat();
  chat.messages = [];
  showTurns();
  at("ask-text").focus();
}

function stopChat() {
  if (chat.running) chat.running.abort();
}

// ---- pictures -----------------------------------------------------------------------------------------------------

function addPictures(files) {
  for (const file of files || []) {
    if (!file.type.startsWith("image/")) continue;
    const reader = new FileReader();
    reader.onload = () => { chat.pictures.push(reader.result); showPictures(); };
    reader.readAsDataURL(file);
  }
}

function picture(url) {
  return el("img", { src: url, alt: "picture of the message" });
}

function showPictures() {
  at("pictures").replaceChildren(...chat.pictures.map((url, place) => el("figure", null, picture(url),
    el("button", { type: "button", "aria-label": "Remove the picture", onclick: () => { chat.pictures.splice(place, 1); showPictures(); } }, "×"))));
}

// ---- what is shown ------------------------------------------------------------------------------------------------

function showTurns(text) {
  const turns = at("turns");
  if (!chat.messages.length) {
    turns.replaceChildren(el("div", { class: "empty" }, text || "Send a message to the model. The chat is gone when you leave the page."));
    return;
  }
  turns.replaceChildren(...chat.messages.map(turn));
  turns.scrollTop = turns.scrollHeight;
}

function turn(message) {
  const who = { user: "You", assistant: message.model, tool: "Tool result" }[message.role];
  const body = el("div", { class: "said" });
  fillTurn(body, message);
  message.node = body;
  return el("article", { class: `turn ${message.role}` }, el("div", { class: "who" }, who), body);
}

function fillTurn(body, message) {
  const parts = [];
  if (message.thought) parts.push(el("details", { open: !message.content }, el("summary", { class: "mute small" }, "Thinking"), el("div", { class: "thought" }, message.thought)));
  const content = Array.isArray(message.content) ? message.content : [{ type: "text", text: message.content || "" }];
  const pictures = content.filter((part) => part.type === "image_url");
  if (pictures.length) parts.push(el("div", { class: "pictures" }, pictures.map((part) => picture(part.image_url.url))));
  for (const part of content) if (part.type === "text" && part.text) parts.push(...markdown(part.text));
  for (const call of message.calls || []) parts.push(callCard(message, call));
  if (message.error) parts.push(el("p", { class: "bad", role: "alert" }, message.error));
  body.replaceChildren(...parts);
}

// A call of a tool: what it asks for, and a form for its result.
function callCard(message, call) {
  const card = el("div", { class: "call" }, el("b", { class: "mono" }, call.name || "…"), el("pre", null, call.arguments));
  if (!message.done || call.result !== undefined) {
    if (call.result !== undefined) card.append(el("div", { class: "mute small" }, "result below"));
    return card;
  }
  const result = el("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "Result, such as {\"celsius\": 21}" });
  card.append(el("form", { onsubmit: (sent) => { sent.preventDefault(); giveResult(message, call, result.value); } },
    result, el("div", { class: "row" }, el("button", { class: "main" }, "Send result"))));
  return card;
}

function giveResult(message, call, text) {
  call.result = text;
  chat.messages.push({ role: "tool", tool_call_id: call.id, content: text });
  showTurns();
  if (message.calls.every((one) => one.result !== undefined)) answer();
}

// ---- asking -------------------------------------------------------------------------------------------------------

function sendText() {
  const text = at("ask-text").value.trim();
  const open = chat.messages.some((one) => one.done && (one.calls || []).some((call) => call.result === undefined));
  if (chat.running || at("send").disabled || (!text && !chat.pictures.length)) return;
  if (open) return notice("Enter the results of the tools first, or start a new chat.");
  notice("");
  const pictures = chat.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  chat.messages.push({ role: "user", content: pictures.length ? [...pictures, ...(text ? [{ type: "text", text }] : [])] : text });
  chat.pictures = [];
  at("ask-text").value = "";
  showPictures();
  showTurns();
  answer();
}

function wireMessages() {
  const found = at("system").value.trim() ? [{ role: "system", content: at("system").value.trim() }] : [];
  for (const { role, content, calls, tool_call_id, error } of chat.messages) {
    if (error && !content && !calls) continue;
    const message = { role, content: content || (calls ? null : "") };
    if (tool_call_id) message.tool_call_id = tool_call_id;
    if (calls) message.tool_calls = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    found.push(message);
  }
  return found;
}

function chatBody() {
  const body = { model: at("chat-model").value, messages: wireMessages(), stream: true, stream_options: { include_usage: true } };
  if (at("temperature").value !== "") body.temperature = Number(at("temperature").value);
  if (at("max-tokens").value !== "") body.max_tokens = Number(at("max-tokens").value);
  if (at("tools").value.trim()) body.tools = JSON.parse(at("tools").value);
  return body;
}

async function answer() {
  let body;
  try { body = chatBody(); } catch (error) { return notice(`Tools must be JSON: ${error.message}`); }
  const message = { role: "assistant", model: body.model || "Model", content: "", done: false };
  chat.messages.push(message);
  showTurns();
  const running = chat.running = new AbortController();
  at("stop").hidden = false;
  at("send").disabled = true;
  const began = performance.now();
  let first = 0, usage = null;
  try {
    for await (const [, data] of events("v1/chat/completions", { body, signal: running.signal })) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) usage = chunk.usage;
      const delta = chunk.choices && chunk.choices[0] && chunk.choices[0].delta;
      if (!delta) continue;
      if (take(message, delta) && !first) first = performance.now();
      refresh(message);
    }
  } catch (error) {
    if (error.name !== "AbortError") message.error = error.message;
  }
  chat.running = null;
  message.done = true;
  at("stop").hidden = true;
  at("send").disabled = false;
  refresh(message);
  if (usage && first) at("speed").textContent = speed(usage, first - began, performance.now() - first);
}

// Add what is new to a message; whether there was something.
function take(message, delta) {
  const thought = delta.reasoning_content || delta.reasoning;
  if (delta.content) message.content += delta.content;
  if (thought) message.thought = (message.thought || "") + thought;
  for (const part of delta.tool_calls || []) {
    message.calls = message.calls || [];
    const call = message.calls[part.index] = message.calls[part.index] || { id: "", name: "", arguments: "" };
    if (part.id) call.id = part.id;
    if (part.function && part.function.name) call.name += part.function.name;
    if (part.function && part.function.arguments) call.arguments += part.function.arguments;
  }
  return Boolean(delta.content || thought || delta.tool_calls);
}

function refresh(message) {
  const turns = at("turns");
  const below = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 80;
  if (message.node) fillTurn(message.node, message);
  if (below) turns.scrollTop = turns.scrollHeight;
}

function speed(usage, waited, took) {
  const rate = usage.completion_tokens > 1 ? `${number((usage.completion_tokens - 1) / (took / 1000), 1)} tokens/s, ` : "";
  const details = usage.prompt_tokens_details;
  const cached = details && details.cached_tokens ? ` (${number(details.cached_tokens)} cached)` : "";
  return `${rate}first after ${number(waited)} ms, ${number(usage.prompt_tokens)}${cached} + ${number(usage.completion_tokens)} tokens`;
}
