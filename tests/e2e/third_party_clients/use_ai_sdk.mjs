// Vercel's AI SDK: with its default of OpenAI's models, which is the Responses API with responses that are kept, and
// with chat completions. What it got goes to stdout as one line, as common.tell does it.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const require = createRequire(`${process.env.NODE_MODULES}/`);
const { createOpenAI } = require("@ai-sdk/openai");
const { generateText, streamText, stepCountIs, tool, Output } = require("ai");
const { z } = require("zod");

const lessons = JSON.parse(process.env.LESSONS);
const bodies = [];
const openai = createOpenAI({
  baseURL: `${process.env.PEGBOARD_ADDRESS}/v1`,
  apiKey: lessons.KEY,
  fetch: (url, init) => {
    bodies.push(JSON.parse(init.body));
    return fetch(url, init);
  },
});
const models = { responses: openai(lessons.MODEL), chat: openai.chat(lessons.MODEL) };
assert.match(models.responses.provider, /responses/);
const common = { temperature: 0, maxOutputTokens: 400, maxRetries: 0 };
const says = (content) => ({ role: "user", content });
const Person = z.object({ name: z.string(), age: z.number().int() });

function tools(called) {
  const one = (name, shape) =>
    tool({ description: name, inputSchema: z.object(shape), execute: async (input) => (called.push(input), lessons.RESULTS[name]) });
  return { get_weather: one("get_weather", { city: z.string() }), get_time: one("get_time", { utc: z.boolean() }) };
}

async function answered(model, streamed, messages, more) {
  const options = { ...common, model, messages, ...more };
  const done = streamed ? streamText({ ...options, onError: ({ error }) => { throw error; } }) : await generateText(options);
  const text = await done.text;
  const all = [...messages, ...((await done.responseMessages) ?? (await done.response).messages)];
  return { text, steps: (await done.steps).length, messages: all, output: await done.output };
}

const asks = {};
for (const [api, model] of Object.entries(models)) {
  const references = () => (api === "chat" ? 0 : bodies.at(-1).input.filter((one) => one.type === "item_reference").length);
  asks[`${api}_second_turn`] = async () => {
    const first = await answered(model, false, [says(lessons.THANKS)]);
    const second = await answered(model, false, [...first.messages, says(lessons.THANKS)]);
    return [first.text, second.text, references()];
  };
  for (const streamed of [false, true]) {
    const kind = streamed ? "streamed" : "whole";
    asks[`${api}_loop_${kind}`] = async () => {
      const called = [];
      const more = { tools: tools(called), stopWhen: stepCountIs(5) };
      const done = await answered(model, streamed, [says(lessons.BOTH)], more);
      const last = await answered(model, streamed, [...done.messages, says(lessons.THANKS)], more);
      return [called, done.steps, done.text, last.text];
    };
    asks[`${api}_object_${kind}`] = async () =>
      (await answered(model, streamed, [says(lessons.WHO)], { output: Output.object({ schema: Person }) })).output;
  }
  asks[`${api}_forced_call`] = async () => {
    const options = { tools: { Person: tool({ inputSchema: Person }) }, toolChoice: { type: "tool", toolName: "Person" } };
    const done = await generateText({ ...common, model, messages: [says(lessons.CALL_WHO)], ...options });
    return done.toolCalls.map((one) => [one.toolName, one.input]);
  };
}

// Forced, so that a model that never heard of it calls it.
asks.custom_tool = async () => {
  const run = openai.tools.customTool({ name: "run", description: "Runs code", execute: async () => "ran" });
  const options = { tools: { run }, toolChoice: "required", maxOutputTokens: 60 };
  const done = await generateText({ ...common, model: models.responses, messages: [says(lessons.THANKS)], ...options });
  return done.toolCalls.map((one) => [one.toolName, typeof one.input, one.input.length > 0]);
};

const told = {};
for (const [name, one] of Object.entries(asks)) {
  try {
    told[name] = { value: await one() };
  } catch (error) {
    told[name] = { error: `${error.stack}\n${error.responseBody ?? ""}` };
  }
}
console.log(JSON.stringify(told));
