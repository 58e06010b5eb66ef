// The head of the page and the start-up section: where the service is in its life.

import { byId, number, percent, setRows, setText } from "./page.js";

export function showStatus(status) {
  const word = status.status;
  const phase = byId("phase");
  phase.dataset.phase = word;
  setText("phase", word);
  setText("story", story(status));
  const { done, total } = status.graphs;
  const progress = byId("graphs-progress");
  progress.max = Math.max(1, total);
  progress.value = done;
  const left = status.eta_s === null ? "" : `, about ${number(status.eta_s)} s left`;
  setText("progress-label", total ? `Graphs: ${done} of ${total}${left}` : "Graphs: not known yet");
  // Folded once, when it is over; whoever opens it again keeps it open.
  const details = byId("startup-details");
  if (word === "ready" && !details.dataset.folded) {
    details.open = false;
    details.dataset.folded = "yes";
  }
}

function story(status) {
  const parts = [];
  if (status.status === "starting") parts.push(`phase ${status.phase}`);
  if (status.reason) parts.push(status.reason);
  if (status.detail && status.status === "starting") parts.push(status.detail);
  if (status.ready_after_s !== undefined) parts.push(`ready after ${number(status.ready_after_s, 1)} s`);
  parts.push(`up ${duration(status.uptime_s)}`);
  return parts.join("; ");
}

function duration(seconds) {
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h`;
}

export function showInfo(info) {
  setText("model", info.model ? `${info.model.name} (${info.model.architecture}, ${info.model.dtype})` : "no model yet");
  setText("device", info.device ? deviceWords(info.device) : "");
  setText("version", `version ${info.versions.version}, vLLM ${info.versions.vllm}`);
  setRows("phases", Object.entries(info.timings.phases).map(([name, seconds]) => [name, number(seconds, 2)]), "none yet");
  setRows("graphs", info.graphs.map((graph) => [
    graph.name,
    graph.state,
    graph.result ?? "",
    graph.seconds === null ? "" : number(graph.seconds, 2),
  ]), "none yet");
  showAdvice(info.bucket_advice);
}

// Steps are written down once a minute, so that there is nothing to advise on before.
function showAdvice(advice) {
  const phases = Object.entries(advice ?? {}).filter(([, told]) => told !== null);
  setRows("advice", phases.map(([phase, told]) => {
    const same = told.suggested.join() === told.current.join();
    return [
      phase,
      number(told.steps),
      told.current.join(", "),
      same ? "as now" : told.suggested.join(", "),
      same ? percent(told.padding_now) : `${percent(told.padding_now)}, then ${percent(told.padding_then)}`,
      same ? "" : `${percent(told.saving)} of step time`,
      same ? "" : told.setting,
    ];
  }), "nothing is recorded yet");
}

function deviceWords(device) {
  if (device.name !== "emulated") return `device ${device.npu ?? device.name}`;
  return `emulated device: this host's CPU (${device.isa ?? device.kernels}), no NPU`;
}
