// What the engine does now, from two scrapes of /metrics a few seconds apart.

import { quantile, rate } from "./exposition.js";
import { bar, bytes, milliseconds, number, percent, setPairs, setRows, setText, spark } from "./page.js";

const HISTORY = 60;
const history = [];
let before = null;

export function showMetrics(now) {
  const speed = rate(before, now, "vllm:generation_tokens_total");
  showTiles(now, speed);
  if (speed !== null) {
    history.push(speed);
    if (history.length > HISTORY) history.shift();
  }
  spark("spark", history, HISTORY);
  setText("spark-now", number(speed));
  showBuckets(now);
  showMemory(now);
  before = now;
}

function showTiles(now, speed) {
  const since = (name, share) => milliseconds(quantile(before, now, name, share));
  const queried = now.sum("vllm:prefix_cache_queries_total");
  const hit = now.sum("vllm:prefix_cache_hits_total");
  setPairs("tiles", [
    ["Output tokens/s", number(speed)],
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
  ], true);
}

function showBuckets(now) {
  const all = now.sum("rbln_bucket_steps_total") || 1;
  const rows = now.all("rbln_bucket_steps_total")
    .filter(({ value }) => value > 0)
    .sort((a, b) => a.labels.phase.localeCompare(b.labels.phase) || a.labels.bucket - b.labels.bucket)
    .map(({ labels, value }) => {
      const { phase, bucket } = labels;
      const seconds = now.sum("rbln_bucket_step_seconds_sum", { phase, bucket });
      return [phase, bucket, number(value), bar(value / all), percent(padding(now, phase, bucket)), milliseconds(seconds / value)];
    });
  setRows("buckets", rows, "no steps yet");
}

// Rows of a decode batch, tokens of a chunk: what was computed for nobody, of all.
function padding(now, phase, bucket) {
  const [name, where] = phase === "decode"
    ? ["rbln_bucket_%_rows_total", { phase, bucket }]
    : ["rbln_prefill_%_tokens_total", { chunk: bucket }];
  const useful = now.sum(name.replace("%", "useful"), where);
  const padded = now.sum(name.replace("%", "padded"), where);
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
