// The models of a server of several: state, requests and memory of each.

import { number, setRows, setText, show } from "./page.js";

const MIB = 1 << 20;

export function showPool({ models, memory }) {
  show("pool", true);
  show("serving", false);
  const mib = (bytes) => `${number(bytes / MIB, 0)} MiB`;
  setText("pool-memory", `${mib(memory.held_bytes)} of ${mib(memory.budget_bytes)} held.`);
  setRows("pool-models", Object.entries(models).map(([name, model]) => [
    name,
    model.pinned ? `${model.state}, pinned` : model.state,
    progress(model),
    String(model.in_flight),
    String(model.waiting),
    mib(model.memory_bytes),
    String(model.loads),
  ]), "none");
}

function progress({ phase, graphs, eta_s: eta, reason }) {
  if (reason) return reason;
  const parts = [];
  if (phase) parts.push(graphs.total ? `${phase}, ${graphs.done} of ${graphs.total} graphs` : phase);
  if (eta !== undefined) parts.push(`about ${number(eta, 0)} s left`);
  return parts.join(", ");
}
