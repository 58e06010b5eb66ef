// The server's HTTP interface: the key of this tab, and errors in the server's words.

const KEY = "rbln-serve-key";

export class RequestFailed extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export function currentKey() {
  return sessionStorage.getItem(KEY);
}

// Relative to the page: a proxy may serve it below a path of its own.
export function urlOf(path) {
  return new URL(path.slice(1), document.baseURI).href;
}

function headers(extra) {
  const key = currentKey();
  return key ? { ...extra, authorization: `Bearer ${key}` } : { ...extra };
}

// Throws a TypeError where there is no answer, RequestFailed where the answer is an error.
export async function request(path, options = {}) {
  const answer = await fetch(urlOf(path), { cache: "no-store", ...options, headers: headers(options.headers) });
  if (!answer.ok) throw new RequestFailed(await reason(answer), answer.status);
  return answer;
}

export async function getJson(path) {
  return (await request(path)).json();
}

export async function postJson(path, body, signal) {
  return request(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
}

// The probe's body is the same whether its status is 200 or 503.
export async function probe() {
  const answer = await fetch(urlOf("/readyz"), { cache: "no-store" });
  return answer.json();
}

// The JSON events of a stream, up to [DONE]; `at` is when the bytes of an event arrived.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The stream ended before the answer was complete.");
    const at = performance.now();
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue;
      const data = frame.slice(6);
      if (data === "[DONE]") return;
      yield { at, ...JSON.parse(data) };
    }
  }
}

async function reason(answer) {
  try {
    const error = (await answer.json()).error;
    return `${answer.status} ${error.code}: ${error.message}`;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}
