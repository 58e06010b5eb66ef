// Polls the server every two seconds, and shows when it does not answer.

import { RequestFailed, getJson, probe, request, setKey, urlOf } from "./api.js";
import { showBackground, showBatches } from "./batches.js";
import { parse } from "./exposition.js";
import { lastSample, showHistory, showMetrics } from "./live.js";
import { byId, copyText, setRows, setText, show } from "./page.js";
import { showModels, startPlayground } from "./playground.js";
import { showInfo, showStatus } from "./startup.js";

const STARTING_MS = 1000;
const SERVING_MS = 2000;
const INFO_EVERY = 15;
const MODELS_EVERY = 5;

let lastAnswer = null;
// Rounds until the server's description, and its models and adapters, are read again.
let infoIn = 0;
let modelsIn = 0;
let hasAdapters = false;
let hasStore = false;

async function tick() {
  let pause = SERVING_MS;
  try {
    const status = await probe();
    lastAnswer = new Date();
    showStatus(status);
    if (status.status === "starting") {
      pause = STARTING_MS;
      infoIn = 0;
    }
    await showRest(status);
    alive(status);
  } catch (error) {
    if (error instanceof RequestFailed) refused(error);
    else silent();
    pause = STARTING_MS;
  }
  setTimeout(tick, pause);
}

async function showRest(status) {
  if (infoIn-- <= 0) {
    infoIn = INFO_EVERY;
    const info = await getJson("/v1/server_info");
    hasAdapters = info.lora !== null;
    hasStore = info.settings.server.data_dir !== null;
    show("stored", hasStore);
    showInfo(info);
  }
  if (status.status === "starting") return;
  const scrape = await request("/metrics");
  const page = parse(await scrape.text(), performance.now() / 1000);
  showHistory((await getJson(`/v1/server_info/history?after=${lastSample()}`)).samples);
  showMetrics(page);
  showBackground(page);
  if (status.status === "ready" && hasStore) showBatches((await getJson("/v1/batches?limit=20")).data);
  if (status.status === "ready" && modelsIn-- <= 0) {
    modelsIn = MODELS_EVERY;
    const models = (await getJson("/v1/models")).data;
    showModels(models.map((model) => model.id));
    // Adapters name the model that they change.
    setText("served", models.filter((model) => !model.parent).map((model) => model.id).join(", "));
    await showAdapters();
  }
}

async function showAdapters() {
  show("adapters-table", hasAdapters);
  show("adapters-note", !hasAdapters);
  if (!hasAdapters) return;
  const adapters = (await getJson("/v1/lora_adapters")).data;
  setRows("adapters", adapters.map((adapter) => [
    adapter.name,
    adapter.state,
    adapter.slot === null ? "" : String(adapter.slot),
    adapter.rank === null ? "" : String(adapter.rank),
    String(adapter.in_flight),
  ]), "none");
}

function alive(status) {
  document.body.classList.remove("stale");
  warn(status.status === "dead" ? `The engine is dead: ${status.reason}` : "");
}

function refused(error) {
  if (error.status === 401 || error.status === 403) {
    byId("key-form").hidden = false;
    setText("key-note", error.message);
    warn("");
    return;
  }
  warn(error.message);
}

function silent() {
  document.body.classList.add("stale");
  byId("phase").dataset.phase = "silent";
  setText("phase", "no answer");
  setText("story", "");
  const since = lastAnswer ? ` since ${lastAnswer.toLocaleTimeString()}` : "";
  warn(`The server does not answer${since}. The page shows its last figures.`);
}

function warn(text) {
  const alert = byId("alert");
  if (alert.textContent !== text) alert.textContent = text;
  alert.hidden = !text;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  // A header could not hold other characters.
  if (!/^[!-~]*$/.test(key)) {
    setText("key-note", "An API key has only printable ASCII characters.");
    return;
  }
  setKey(key);
  byId("key").value = "";
  byId("key-form").hidden = true;
  infoIn = modelsIn = 0;
});
const base = urlOf("/v1");
setText("base-url", base);
byId("base-copy").addEventListener("click", async () => {
  setText("base-note", (await copyText(base)) ? "Copied." : "The browser does not let the page copy.");
});
startPlayground();
tick();
