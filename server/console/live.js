// What the engine does now, from two scrapes of /metrics a few seconds apart.

import { Chart } from "./charts.js";
import { quantile, rate } from "./exposition.js";
import { bar, bytes, milliseconds, number, percent, setPairs, setRows } from "./page.js";

const whole = (share) => `${Math.round(100 * share)} %`;
const count = (value) => number(value, value > 0 && value < 5 && !Number.isInteger(value) ? 1 : 0);
const charts = {
  speed: new Chart("chart-speed", { series: { first: "output", second: "prompt" }, show: count }),
  queue: new Chart("chart-queue", { series: { first: "running", second: "waiting" }, show: count }),
  padding: new Chart("chart-padding", { series: { first: "decode", second: "prefill" }, show: whole, full: 1 }),
  kv: new Chart("chart-kv", { series: { first: "" }, show: whole, full: 1 }),
};
const PADDING = {
  decode: ["rbln_bucket_useful_rows_total", "rbln_bucket_padded_rows_total", { phase: "decode" }],
  prefill: ["rbln_prefill_useful_tokens_total", "rbln_prefill_padded_tokens_total", {}],
};
let before = null;

export function showMetrics(now) {
  showTiles(now);
  showCharts(now);
  showBuckets(now);
  showMemory(now);
  before = now;
}

function showCharts(now) {
  const speed = ["vllm:generation_tokens_total", "vllm:prompt_tokens_total"];
  if (before) charts.speed.add(now.at, speed.map((name) => rate(before, now, name)));
  charts.queue.add(now.at, ["running", "waiting"].map((name) => now.sum(`vllm:num_requests_${name}`)));
  charts.padding.add(now.at, ["decode", "prefill"].map((phase) => paddedSince(now, phase)));
  charts.kv.add(now.at, [now.sum("vllm:kv_cache_usage_perc")]);
}

// The share of what was computed for nobody since the scrape before; null where nothing ran.
function paddedSince(now, phase) {
  const [useful, padded, where] = PADDING[phase];
  const rows = rate(before, now, useful, where);
  const empty = rate(before, now, padded, where) ?? 0;
  return rows ? empty / (rows + empty) : null;
}

function showTiles(now) {
  const since = (name, share) => milliseconds(quantile(before, now, name, share));
  const queried = now.sum("vllm:prefix_cache_queries_total");
  const hit = now.sum("vllm:prefix_cache_hits_total");
  const drafted = now.sum("rbln_draft_tokens_total");
  const accepted = now.sum("rbln_draft_accepted_tokens_total");
  const checks = now.sum("rbln_bucket_steps_total", { phase: "verify" });
  const gain = now.sum("rbln_draft_gain_total") / checks;
  setPairs("tiles", [
    ["Output tokens/s", number(rate(before, now, "vllm:generation_tokens_total"))],
    ["Prompt tokens/s", number(rate(before, now, "vllm:prompt_tokens_total"))],
    ["Running", number(now.sum("vllm:num_requests_running"))],
    ["Waiting", number(now.sum("vllm:num_requests_waiting"))],
    ["In flight over HTTP", number(now.sum("rbln_serve_in_flight_requests"))],
    ["First token, median", since("vllm:time_to_first_token_seconds", 0.5)],
    ["Between tokens, median", since("vllm:inter_token_latency_seconds", 0.5)],
    ["Between tokens, 99th", since("vllm:inter_token_latency_seconds", 0.99)],
    ["Paged KV in use", percent(now.sum("vllm:kv_cache_usage_perc"))],
    ["Prompt tokens from cache", queried ? percent(hit / queried) : "–"],
    ["Hot-path compiles", number(now.sum("rbln_recompiles_after_warmup_total"))],
    ["Preemptions", number(now.sum("vllm:num_preemptions_total"))],
    ...(drafted ? [["Drafts accepted", percent(accepted / drafted)], ["Gain of drafts", `${number(gain, 2)} times`]] : []),
  ], true);
}

function showBuckets(now) {
  const all = now.sum("rbln_bucket_steps_total") || 1;
  const rows = now.all("rbln_bucket_steps_total")
    .filter(({ value }) => value > 0)
    .sort((a, b) => a.labels.phase.localeCompare(b.labels.phase) || inOrder(a.labels.bucket, b.labels.bucket))
    .map(({ labels, value }) => {
      const { phase, bucket } = labels;
      const seconds = now.sum("rbln_bucket_step_seconds_sum", { phase, bucket });
      return [phase, bucket, number(value), bar(value / all), percent(padding(now, phase, bucket)), milliseconds(seconds / value)];
    });
  setRows("buckets", rows, "no steps yet");
}

// Sizes as numbers: "8", or "8x4" for 4 tokens of each of 8 requests.
function inOrder(one, other) {
  const [a, b] = [one, other].map((size) => size.split("x").map(Number));
  return a[0] - b[0] || (a[1] ?? 1) - (b[1] ?? 1);
}

// Rows of a decode batch, tokens of a chunk: what was computed for nobody, of all.
function padding(now, phase, bucket) {
  const isBatch = phase === "decode" || phase === "verify";
  const where = isBatch ? { phase, bucket } : { chunk: bucket };
  const [useful, padded] = PADDING[isBatch ? "decode" : "prefill"].slice(0, 2).map((name) => now.sum(name, where));
  return useful === null || padded === null ? null : padded / Math.max(1, useful + padded);
}

function showMemory(now) {
  setRows("kv", now.all("rbln_kv_blocks").map(({ labels, value }) => [
    labels.group,
    labels.kind,
    number(now.sum("rbln_kv_blocks_used", { group: labels.group })),
    number(value),
  ]), "no KV cache yet");
  setPairs("cache", [
    ["Entries", number(now.sum("rbln_compile_cache_entries"))],
    ["Size", bytes(now.sum("rbln_compile_cache_size_bytes"))],
    ...["hit", "miss", "corrupt"].map((result) => [
      `Look-ups: ${result}`,
      number(now.sum("rbln_compile_cache_requests_total", { result }) ?? 0),
    ]),
    ["Weights", bytes(now.sum("rbln_device_memory_bytes", { kind: "weights" }))],
    ["KV cache", bytes(now.sum("rbln_device_memory_bytes", { kind: "kv" }))],
  ]);
}
