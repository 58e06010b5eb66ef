// One answer as it streams in: reasoning, text, tool calls, and the figures below the conversation.

import { showMarkdown } from "./markdown.js";
import { element, number } from "./page.js";

const RENDER_MS = 100;
// A rate over less time than this says how events were bundled, not how fast tokens were made.
const RATE_MS = 250;

function progressText({ processed, total, eta_ms: left }) {
  return `Reading the prompt: ${number(processed)} of ${number(total)} tokens, about ${Math.ceil(left / 1000)} s left.`;
}

export class Answer {
  constructor(holder) {
    this.holder = holder;
    this.text = this.reasoning = "";
    this.calls = [];
    this.began = performance.now();
    this.first = this.last = this.tokens = this.reason = null;
    this.content = element("div", { className: "content" });
    holder.append(this.content);
    this.renderAt = 0;
  }

  // Takes one event of the stream; throws the error that the server sent in it.
  take({ at, error, usage, choices, prompt_progress: progress }) {
    if (error) throw new Error(`${error.code}: ${error.message}`);
    if (progress) this.content.textContent = progressText(progress);
    if (usage) this.tokens = usage.completion_tokens;
    const choice = choices?.[0];
    if (choice?.finish_reason) this.reason = choice.finish_reason;
    const { content, reasoning, tool_calls: calls } = choice?.delta ?? {};
    if (!content && !reasoning && !calls?.length) return;
    this.first ??= at;
    this.last = at;
    this.reasoning += reasoning ?? "";
    this.text += content ?? "";
    for (const piece of calls ?? []) this.takeCall(piece);
    this.renderSometimes();
  }

  takeCall({ index, id, function: part = {} }) {
    let call = this.calls.find((known) => known.index === index);
    if (!call) {
      call = { index, id: "", name: "", arguments: "", ...callView() };
      this.calls.push(call);
      this.holder.append(call.view);
    }
    if (id) call.id = id;
    call.name += part.name ?? "";
    call.arguments += part.arguments ?? "";
  }

  // The whole text is rendered each time, which takes longer as it grows: every 100 ms, and at most
  // a fifth of the time.
  renderSometimes() {
    const began = performance.now();
    if (began < this.renderAt) return;
    this.render();
    const ended = performance.now();
    this.renderAt = ended + Math.max(RENDER_MS, 4 * (ended - began));
  }

  render() {
    if (this.reasoning) this.showReasoning();
    showMarkdown(this.content, this.text);
    for (const call of this.calls) {
      call.head.textContent = call.name;
      call.body.textContent = call.arguments;
    }
  }

  // Open while there is no answer yet, then folded once.
  showReasoning() {
    if (!this.details) {
      this.thoughts = element("div", { className: "plain" });
      this.details = element("details", { className: "reasoning", open: true });
      this.details.append(element("summary", { textContent: "Reasoning" }), this.thoughts);
      this.content.before(this.details);
    }
    this.thoughts.textContent = this.reasoning;
    if (!this.text || this.folded) return;
    this.folded = true;
    this.details.open = false;
  }

  // Shows the rest; to be called once, after the last event or in place of it.
  end() {
    this.render();
    for (const { body, view, arguments: text } of this.calls) {
      const value = parsed(text);
      if (value !== null) body.textContent = JSON.stringify(value, null, 2);
      else view.append(element("p", { className: "failed", textContent: "The arguments are not a JSON object: the next request leaves this call out." }));
    }
  }

  get empty() {
    return !this.text && !this.reasoning && !this.calls.length;
  }

  // Calls that can be answered: not cut off, and with arguments that are a JSON object.
  get usableCalls() {
    return this.calls.filter((call) => parsed(call.arguments) !== null);
  }

  // The message of the API.
  message() {
    const calls = this.usableCalls.map(({ id, name, arguments: text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
    return { role: "assistant", content: this.text || (calls.length ? null : ""), ...(calls.length && { tool_calls: calls }) };
  }

  figures() {
    if (this.first === null) return "";
    const parts = [`first token after ${number(this.first - this.began)} ms`];
    if (this.tokens !== null) parts.push(`${this.tokens} tokens`);
    const took = this.last - this.first;
    if (this.tokens > 1 && took >= RATE_MS) parts.push(`${number((this.tokens - 1) / (took / 1000), 1)} tokens/s`);
    else if (this.tokens > 1) parts.push("arrived at once: no rate");
    if (this.reason) parts.push(`finish reason: ${this.reason}`);
    return parts.join("; ");
  }
}

function callView() {
  const [view, head, body] = [element("div", { className: "call" }), element("strong"), element("pre")];
  view.append("Tool call: ", head, body);
  return { view, head, body };
}

// The object that the text holds; null for every other text.
function parsed(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}
