// The server's HTTP interface: the key of this tab, and errors as the server words them.

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

function headers(extra) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, authorization: `Bearer ${key}` } : { ...extra };
}

// Relative to the page: a proxy may have put the server below a path of its own.
function url(path) {
  return new URL(path.slice(1), document.baseURI);
}

// Throws a TypeError when nobody answers, RequestFailed when the answer is an error.
export async function request(path, options = {}) {
  const answer = await fetch(url(path), { cache: "no-store", ...options, headers: headers(options.headers) });
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
  const answer = await fetch(url("/readyz"), { cache: "no-store" });
  return answer.json();
}

async function reason(answer) {
  try {
    const error = (await answer.json()).error;
    return `${answer.status} ${error.code}: ${error.message}`;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}
