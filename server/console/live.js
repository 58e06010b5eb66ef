// The engine's work: charts of the samples that the server has recorded, figures of /metrics.

import { Chart } from "./charts.js";
import { Recent, quantile } from "./exposition.js";
import { bar, bytes, milliseconds, number, percent, setPairs, setRows } from "./page.js";

// Tokens per second are means over this many of the server's samples, 10 s.
const SAMPLES = 2;
const LATENCY_S = 30;

const whole = (share) => `${Math.round(100 * share)} %`;
const count = (value) => number(value, value > 0 && value < 5 && !Number.isInteger(value) ? 1 : 0);
const charts = {
  speed: new Chart("chart-speed", { series: { first: "output", second: "prompt" }, show: count }),
  queue: new Chart("chart-queue", { series: { first: "running", second: "waiting" }, show: count }),
  padding: new Chart("chart-padding", { series: { first: "decode", second: "prefill" }, show: whole, full: 1 }),
  kv: new Chart("chart-kv", { series: { first: "" }, show: whole, full: 1 }),
};
const VALUES = {
  speed: (sample) => [sample.output_tokens / sample.seconds, sample.prompt_tokens / sample.seconds],
  queue: (sample) => [sample.running, sample.waiting],
  padding: (sample) => [sample.decode_padding, sample.prefill_padding],
  kv: (sample) => [sample.kv_cache_usage],
};
const PADDING = {
  decode: ["rbln_bucket_useful_rows_total", "rbln_bucket_padded_rows_total"],
  prefill: ["rbln_prefill_useful_tokens_total", "rbln_prefill_padded_tokens_total"],
};
const pages = new Recent(LATENCY_S);
let latest = [];

// The number of the last sample that is shown; 0 for none.
export function lastSample() {
  return latest.at(-1)?.number ?? 0;
}

// Samples of /v1/server_info/history that are not shown yet, the oldest first.
export function showHistory(samples) {
  if (!samples.length) return;
  latest = [...latest, ...samples].slice(-SAMPLES);
  for (const [name, chart] of Object.entries(charts)) {
    chart.extend(samples.map((sample) => ({ at: sample.at, values: VALUES[name](sample) })));
  }
}

export function showMetrics(now) {
  pages.add(now);
  showTiles(now);
  showBuckets(now);
  showMemory(now);
}

function perSecond(field) {
  const seconds = latest.reduce((total, sample) => total + sample.seconds, 0);
  return seconds ? number(latest.reduce((total, sample) => total + sample[field], 0) / seconds) : "–";
}

function showTiles(now) {
  const median = (name, share) => milliseconds(quantile(pages.first(), now, name, share));
  const queried = now.sum("vllm:prefix_cache_queries_total");
  const hit = now.sum("vllm:prefix_cache_hits_total");
  const drafted = now.sum("rbln_draft_tokens_total");
  const accepted = now.sum("rbln_draft_accepted_tokens_total");
  const checks = now.sum("rbln_bucket_steps_total", { phase: "verify" });
  const gain = now.sum("rbln_draft_gain_total") / checks;
  setPairs("tiles", [
    ["Output tokens/s", perSecond("output_tokens")],
    ["Prompt tokens/s", perSecond("prompt_tokens")],
    ["Running", number(now.sum("vllm:num_requests_running"))],
    ["Waiting", number(now.sum("vllm:num_requests_waiting"))],
    ["In flight over HTTP", number(now.sum("rbln_serve_in_flight_requests"))],
    ["First token, median", median("vllm:time_to_first_token_seconds", 0.5)],
    ["Between tokens, median", median("vllm:inter_token_latency_seconds", 0.5)],
    ["Between tokens, 99th", median("vllm:inter_token_latency_seconds", 0.99)],
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

// The share of padding in the rows of decode batches, or in the tokens of a chunk size.
function padding(now, phase, bucket) {
  const isBatch = phase === "decode" || phase === "verify";
  const where = isBatch ? { phase, bucket } : { chunk: bucket };
  const [useful, padded] = PADDING[isBatch ? "decode" : "prefill"].map((name) => now.sum(name, where));
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
