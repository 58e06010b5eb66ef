// The head of the page and the start-up section: phase, progress and description of the service.

import { byId, duration, number, percent, setRows, setText, show } from "./page.js";

// Whether the served model generates text; a pooling model has no playground.
let chats = true;

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
  const starting = status.ready_after_s === undefined;
  show("serving", !starting);
  show("playground", !starting && chats);
  show("wait-note", starting);
  show("steps", starting);
  show("progress", word === "starting");
  if (starting) showSteps(status);
  else setText("headline", `Ready after ${number(status.ready_after_s, 1)} s`);
  // Folded once, when the start is over; it stays open where the user opens it again.
  const details = byId("startup-details");
  if (word === "ready" && !details.dataset.folded) {
    details.open = false;
    details.dataset.folded = "yes";
  }
}

function showSteps(status) {
  const { detail } = status;
  const current = status.phase === "init" && /kernel/i.test(detail) ? "kernels" : status.phase;
  // A detail such as "kernels" would repeat the step's name.
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
  // Graphs where they are planned, else time where an estimate is known, else an indeterminate bar.
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
  chats = info.model?.runner !== "pooling";
  setText("model", info.model ? `${info.model.name} (${info.model.architecture}, ${info.model.dtype})` : "");
  setText("context", info.limits ? `${info.limits.max_model_len.toLocaleString("en")} tokens` : "");
  setText("device", info.device ? deviceWords(info.device) : "");
  setText("version", `${info.versions.version}, vLLM ${info.versions.vllm}`);
  setRows("phases", Object.entries(info.timings.phases).map(([name, seconds]) => [name, number(seconds, 2)]), "none yet");
  setRows("graphs", info.graphs.map((graph) => [
    graph.name,
    graph.state,
    graph.result ?? "",
    graph.seconds === null ? "" : number(graph.seconds, 2),
  ]), "none yet");
  showAdvice(info.bucket_advice);
}

// Steps are recorded once a minute: before that there is no advice.
function showAdvice(advice) {
  const phases = Object.entries(advice ?? {}).filter(([, entry]) => entry !== null);
  const better = phases.filter(([, entry]) => entry.suggested.join() !== entry.current.join());
  show("advice-table", better.length > 0);
  show("advice-note", !better.length);
  // Of few steps, the error of the predicted time is larger than the time itself.
  const noise = Math.max(0, ...phases.map(([, entry]) => entry.noise));
  setText("advice-note", phases.length && noise < 1
    ? `The tuner would change no size: other sizes would save less than step times vary (${percent(noise)}).`
    : "The tuner has recorded too few steps yet.");
  setRows("advice", better.map(([phase, entry]) => [
    phase,
    number(entry.steps),
    entry.current.join(", "),
    entry.suggested.join(", "),
    `${percent(entry.padding_now)}, then ${percent(entry.padding_then)}`,
    `${percent(entry.saving)} of step time`,
    entry.setting,
  ]), "");
}

function deviceWords(device) {
  if (device.name !== "emulated") return device.npu ?? device.name;
  return `emulated on this host's CPU (${device.isa ?? device.kernels}), no NPU`;
}
