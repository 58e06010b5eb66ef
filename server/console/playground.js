// A streamed conversation with a choice of model, tools and schema.

import { Answer } from "./answer.js";
import { currentKey, events, postJson, urlOf } from "./api.js";
import { curlCommand } from "./curl.js";
import { byId, copyText, element, number, setText } from "./page.js";

const PATH = "/v1/chat/completions";
const EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Return the weather of a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

let conversation = newConversation();
let running = null;
let resultFields = 0;

// Messages of the API; tool calls of the last one that have no result yet; the last request's body.
function newConversation() {
  return { messages: [], open: [], sent: null };
}

export function startPlayground() {
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("chat-text").addEventListener("keydown", (event) => {
    // Enter that ends the composition of a character belongs to the input method; Safari sends it
    // after the composition, as key 229.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    byId("chat-form").requestSubmit();
  });
  byId("chat-stop").addEventListener("click", () => running?.abort());
  byId("chat-clear").addEventListener("click", clear);
  byId("chat-curl").addEventListener("click", copyRequest);
  byId("schema-check").addEventListener("click", checkSchema);
  byId("tools-example").addEventListener("click", () => {
    byId("chat-tools").value = JSON.stringify(EXAMPLE, null, 2);
  });
}

export function showModels(ids) {
  const select = byId("chat-model");
  const shown = [...select.options].map((option) => option.value);
  if (shown.join("\n") === ids.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...ids.map((id) => new Option(id, id)));
  if (ids.includes(chosen)) select.value = chosen;
}

function clear() {
  conversation = newConversation();
  running?.abort();
  byId("chat-log").replaceChildren();
  note("");
  byId("chat-text").focus();
}

async function checkSchema() {
  try {
    const answer = await postJson("/v1/structured_outputs/validate", { json: readJson("chat-schema", "The schema") ?? {} });
    const verdict = await answer.json();
    setText("schema-note", verdict.valid ? `valid; compiled in ${number(verdict.compile_ms)} ms` : verdict.reason);
  } catch (error) {
    setText("schema-note", error.message);
  }
}

// The value of a field that holds JSON; null where it is empty.
function readJson(id, name) {
  const text = byId(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not JSON: ${error.message}`);
  }
}

function readTools() {
  const tools = readJson("chat-tools", "The list of tools");
  if (tools !== null && !Array.isArray(tools)) throw new Error("The tools are not a JSON array.");
  return tools?.length ? tools : null;
}

function bodyOf(messages) {
  const system = byId("chat-system").value.trim();
  const schema = readJson("chat-schema", "The schema");
  const tools = readTools();
  const [most, temperature] = ["chat-tokens", "chat-temperature"].map((id) => byId(id).value);
  return {
    model: byId("chat-model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    ...(most && { max_tokens: Number(most) }),
    ...(temperature && { temperature: Number(temperature) }),
    ...(tools && { tools, tool_choice: byId("chat-choice").value }),
    ...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
    stream: true,
    return_progress: true,
    stream_options: { include_usage: true },
  };
}

// What the next request adds: results of open tool calls, then the text of the user.
function nextMessages() {
  const results = conversation.open.map(({ id, field }) => ({ role: "tool", tool_call_id: id, content: field.value }));
  const text = byId("chat-text").value;
  return text.trim() ? [...results, { role: "user", content: text }] : results;
}

async function send() {
  if (running) return;
  const here = conversation;
  const added = nextMessages();
  if (!added.length) return;
  let body;
  try {
    body = bodyOf([...here.messages, ...added]);
  } catch (error) {
    note(error.message);
    return;
  }
  const text = byId("chat-text").value;
  lock(here.open, true);
  byId("chat-text").value = "";
  if (added.at(-1).role === "user") turn("You", text);
  const holder = turn("Answer");
  const answer = new Answer(holder);
  const failure = await stream(here, body, answer);
  // Another conversation was begun meanwhile.
  if (here !== conversation) return;
  const stopped = failure?.name === "AbortError";
  if (!failure || (stopped && !answer.empty)) {
    here.messages.push(...added, answer.message());
    following(() => {
      here.open = answer.usableCalls.map((call) => resultField(call));
    });
  } else {
    // The same message can be sent again.
    lock(here.open, false);
    byId("chat-text").value ||= text;
  }
  if (failure) following(() => failed(holder, stopped ? "Stopped." : words(failure)));
  note(answer.figures());
}

// Shows the answer as it arrives; returns the error that ended it, null where it is complete.
async function stream(here, body, answer) {
  busy(true);
  note("");
  try {
    const response = await postJson(PATH, body, running.signal);
    here.sent = body;
    for await (const event of events(response)) following(() => answer.take(event));
    return null;
  } catch (error) {
    return error;
  } finally {
    following(() => answer.end());
    busy(false);
  }
}

// Results are part of the conversation once they are sent.
function lock(results, locked) {
  for (const { field, button } of results) {
    field.readOnly = locked;
    button.hidden = locked;
  }
}

function words(error) {
  return error instanceof TypeError ? "The connection to the server failed." : error.message;
}

function resultField(call) {
  const id = `result-${++resultFields}`;
  const field = element("textarea", { id, rows: 2 });
  const button = element("button", { type: "button", textContent: "Send the results" });
  button.addEventListener("click", send);
  call.view.append(element("label", { htmlFor: id, textContent: `Result of ${call.name}` }), field, button);
  return { id: call.id, field, button };
}

async function copyRequest() {
  try {
    const added = nextMessages();
    // With nothing typed, the request of the last answer.
    const body = added.length || !conversation.sent ? bodyOf([...conversation.messages, ...added]) : conversation.sent;
    if (!body.messages.length) throw new Error("Type a message first.");
    const copied = await copyText(curlCommand(urlOf(PATH), currentKey(), body));
    if (!copied) throw new Error("The browser does not let the page copy.");
    note(currentKey() ? "Copied, with the API key in it." : "Copied.");
  } catch (error) {
    note(error.message);
  }
}

function busy(on) {
  running = on ? new AbortController() : null;
  byId("chat-send").disabled = on;
  byId("chat-stop").disabled = !on;
  byId("chat-log").setAttribute("aria-busy", String(on));
}

function note(text) {
  setText("chat-figures", text);
}

// Makes a change, and keeps the end of the conversation in view unless the user has scrolled up.
function following(change) {
  const log = byId("chat-log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function turn(who, text = null) {
  const holder = element("article");
  holder.append(element("h3", { textContent: who }));
  if (text !== null) holder.append(element("div", { className: "plain", textContent: text }));
  const log = byId("chat-log");
  log.append(holder);
  log.scrollTop = log.scrollHeight;
  return holder;
}

function failed(holder, text) {
  holder.append(element("p", { className: "failed", textContent: text }));
}
