// A streamed conversation with a choice of model, adapter and schema.

import { postJson } from "./api.js";
import { byId, number, setText } from "./page.js";

let turns = [];
let running = null;

export function startPlayground() {
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("chat-stop").addEventListener("click", () => running?.abort());
  byId("chat-clear").addEventListener("click", () => {
    running?.abort();
    turns = [];
    byId("chat-log").replaceChildren();
    setText("chat-figures", "");
  });
  byId("schema-check").addEventListener("click", checkSchema);
}

export function showModels(ids) {
  const select = byId("chat-model");
  const shown = [...select.options].map((option) => option.value);
  if (shown.join("\n") === ids.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...ids.map((id) => new Option(id, id)));
  if (ids.includes(chosen)) select.value = chosen;
}

async function checkSchema() {
  try {
    const answer = await postJson("/v1/structured_outputs/validate", { json: readSchema() ?? {} });
    const verdict = await answer.json();
    setText("schema-note", verdict.valid ? `fits; compiled in ${number(verdict.compile_ms)} ms` : verdict.reason);
  } catch (error) {
    setText("schema-note", error.message);
  }
}

function readSchema() {
  const text = byId("chat-schema").value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The schema is not JSON: ${error.message}`);
  }
}

function body() {
  const system = byId("chat-system").value.trim();
  const schema = readSchema();
  return {
    model: byId("chat-model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    max_tokens: Number(byId("chat-tokens").value),
    temperature: Number(byId("chat-temperature").value),
    stream: true,
    stream_options: { include_usage: true },
    ...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
  };
}

async function send() {
  if (running) return;
  const text = byId("chat-text").value;
  turns.push({ role: "user", content: text });
  write("You", text);
  const answer = write("Answer", "");
  running = new AbortController();
  busy(true);
  const figures = { began: performance.now(), first: null, tokens: null, reason: null };
  try {
    const stream = await postJson("/v1/chat/completions", body(), running.signal);
    byId("chat-text").value = "";
    for await (const event of events(stream)) take(event, answer, figures);
    turns.push({ role: "assistant", content: answer.textContent });
  } catch (error) {
    fail(error, answer);
  } finally {
    tell(figures);
    running = null;
    busy(false);
  }
}

function take(event, answer, figures) {
  if (event.error) throw new Error(`${event.error.code}: ${event.error.message}`);
  if (event.usage) figures.tokens = event.usage.completion_tokens;
  const choice = event.choices?.[0];
  if (choice?.finish_reason) figures.reason = choice.finish_reason;
  const piece = choice?.delta?.content;
  if (!piece) return;
  figures.first ??= performance.now();
  answer.textContent += piece;
  const log = byId("chat-log");
  log.scrollTop = log.scrollHeight;
}

function fail(error, answer) {
  if (error.name === "AbortError") {
    turns.push({ role: "assistant", content: answer.textContent });
    answer.append(" (stopped)");
    return;
  }
  // A turn that got no answer would be sent again with the next one.
  turns.pop();
  answer.classList.add("failed");
  answer.textContent += error instanceof TypeError ? "The server does not answer." : error.message;
}

function tell({ began, first, tokens, reason }) {
  if (first === null) return setText("chat-figures", "");
  const parts = [`first token after ${number(first - began)} ms`];
  if (tokens !== null) {
    const seconds = (performance.now() - first) / 1000;
    parts.push(`${tokens} tokens`, `${number((tokens - 1) / Math.max(seconds, 0.001), 1)} tokens/s`);
  }
  if (reason) parts.push(`ended by ${reason}`);
  return setText("chat-figures", parts.join("; "));
}

function busy(on) {
  byId("chat-send").disabled = on;
  byId("chat-stop").disabled = !on;
  byId("chat-log").setAttribute("aria-busy", String(on));
}

function write(who, text) {
  const turn = document.createElement("article");
  const head = document.createElement("h3");
  const content = document.createElement("div");
  head.textContent = who;
  content.textContent = text;
  turn.append(head, content);
  byId("chat-log").append(turn);
  return content;
}

// The JSON events of an SSE answer, up to [DONE].
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue;
      const data = frame.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
