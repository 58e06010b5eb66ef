// The head of the page and the start-up section: where the service is in its life.

import { byId, duration, number, percent, setRows, setText, show } from "./page.js";

const STEPS = {
  init: "Starting the engine",
  kernels: "Building kernels",
  load: "Loading weights",
  compile: "Compiling graphs",
  warmup: "Warming up",
};

export function showStatus(status) {
  const word = status.status;
  byId("phase").dataset.phase = word;
  setText("phase", word);
  setText("story", story(status));
  // What a start has no figures for waits until there are some.
  const starting = status.ready_after_s === undefined;
  show("serving", !starting);
  show("wait-note", starting);
  show("steps", starting);
  show("progress", word === "starting");
  if (starting) showSteps(status);
  else setText("headline", `Ready after ${number(status.ready_after_s, 1)} s`);
  // Folded once, when it is over; whoever opens it again keeps it open.
  const details = byId("startup-details");
  if (word === "ready" && !details.dataset.folded) {
    details.open = false;
    details.dataset.folded = "yes";
  }
}

function showSteps(status) {
  const { detail } = status;
  const current = status.phase === "init" && /kernel/i.test(detail) ? "kernels" : status.phase;
  // A word such as "kernels" says no more than the step does.
  const more = !detail || STEPS[current]?.toLowerCase().includes(detail.toLowerCase()) ? "" : `: ${detail}`;
  setText("headline", `${STEPS[current] ?? status.phase}${more}`);
  const reached = Object.keys(STEPS).indexOf(current);
  byId("steps").replaceChildren(...Object.values(STEPS).map((words, index) => {
    const step = document.createElement("li");
    step.textContent = words;
    if (index < reached) step.className = "done";
    if (index === reached) step.setAttribute("aria-current", "step");
    return step;
  }));
  showProgress(status);
}

function showProgress({ graphs: { done, total }, eta_s: eta, uptime_s: uptime }) {
  const progress = byId("graphs-progress");
  // The time that passed of all there will be, where it is known; else the graphs; else only that it goes on.
  if (total || eta !== null) {
    progress.max = total ? total : uptime + eta;
    progress.value = total ? done : uptime;
  } else {
    progress.removeAttribute("value");
  }
  const parts = [total ? `Graphs: ${done} of ${total}` : "Graphs: not known yet", `${duration(uptime)} so far`];
  if (eta !== null) parts.push(`about ${duration(Math.max(1, Math.round(eta)))} left`);
  setText("progress-label", parts.join(", "));
}

function story(status) {
  const parts = [];
  if (status.reason) parts.push(status.reason);
  parts.push(`up ${duration(status.uptime_s)}`);
  return parts.join("; ");
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

// Steps are written down once a minute, so that there is nothing to advise on before. Less than the
// step times can tell is no advice.
function showAdvice(advice) {
  const phases = Object.entries(advice ?? {}).filter(([, told]) => told !== null);
  const better = phases.filter(([, told]) => told.suggested.join() !== told.current.join());
  show("advice-table", better.length > 0);
  show("advice-note", !better.length);
  // Where few steps were measured, what they are said to take misses their time by more than all.
  const noise = Math.max(0, ...phases.map(([, told]) => told.noise));
  setText("advice-note", phases.length && noise < 1
    ? `The tuner would change no size: others would save less than step times tell (${percent(noise)}).`
    : "The tuner has too few steps to go by yet.");
  setRows("advice", better.map(([phase, told]) => [
    phase,
    number(told.steps),
    told.current.join(", "),
    told.suggested.join(", "),
    `${percent(told.padding_now)}, then ${percent(told.padding_then)}`,
    `${percent(told.saving)} of step time`,
    told.setting,
  ]), "");
}

function deviceWords(device) {
  if (device.name !== "emulated") return `device ${device.npu ?? device.name}`;
  return `emulated device: this host's CPU (${device.isa ?? device.kernels}), no NPU`;
}
