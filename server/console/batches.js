// Background work, which runs in padding rows: batches and the tier flex; and stored responses.

import { Recent, rate } from "./exposition.js";
import { bar, bytes, duration, number, setPairs, setRows, setText } from "./page.js";

const ROWS = "rbln_background_rows_total";
const pages = new Recent(10);

// A row of a decode step is one token of background work: of an answer, or of a prompt.
export function showBackground(now) {
  pages.add(now);
  const full = now.sum("rbln_storage_full") > 0;
  setPairs("background", [
    ["Padding rows earned", number(now.sum(ROWS, { kind: "padding" }))],
    ["Of these per second", number(rate(pages.first(), now, ROWS, { kind: "padding" }), 1)],
    ["Prompt tokens read there", number(now.sum(ROWS, { kind: "prompt" }))],
    ["Rows in own steps", number(now.sum(ROWS, { kind: "alone" }))],
    ["Parked rows", number(now.sum("rbln_background_parked"))],
    ["Lines running", number(now.sum("rbln_batch_lines_running"))],
    ["Lines to do", number(now.sum("rbln_batch_lines_to_do"))],
    ["Flex answers in flight", number(now.sum("rbln_admission_flex_in_flight"))],
    ["Free on the disk", full ? "full: answers wait" : bytes(now.sum("rbln_storage_free_bytes"))],
  ], true);
  const stored = now.all("rbln_stored_responses").filter(({ value }) => value > 0);
  const words = stored.map(({ labels, value }) => `${number(value)} ${inWords(labels.status)}`);
  setText("responses", `Stored responses of all keys: ${words.join(", ") || "none"}`);
}

// `batches` are batch objects of OpenAI's API, the newest first.
export function showBatches(batches) {
  setRows("batches", batches.map((batch) => [
    batch.id,
    batch.endpoint,
    state(batch),
    lines(batch.request_counts),
    duration(Math.max(0, Date.now() / 1000 - batch.created_at)),
    batch.model ?? "",
  ]), "none");
}

// A failed batch shows the code and the line of its first error.
function state({ status, errors }) {
  if (!errors) return inWords(status);
  const [{ code, line }] = errors.data;
  return `${inWords(status)}: ${code}${line === null ? "" : `, line ${line}`}`;
}

function lines({ completed, failed, total }) {
  const all = Math.max(1, total);
  const words = `${completed} of ${total}${failed ? `, ${failed} failed` : ""}`;
  return bar(completed / all, { failed: failed / all, words });
}

function inWords(status) {
  return status.replaceAll("_", " ");
}
