// Prometheus' text format, as much of it as the console reads.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// Returns a Page of the samples of one scrape; `at` is in seconds.
export function parse(text, at) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) labels[name] = value;
    if (!samples.has(match[1])) samples.set(match[1], []);
    samples.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return new Page(samples, at);
}

export class Page {
  constructor(samples, at) {
    this.samples = samples;
    this.at = at;
  }

  all(name) {
    return this.samples.get(name) ?? [];
  }

  // The sum over all label values that fit; null when the metric is not there.
  sum(name, where = {}) {
    const fitting = this.all(name).filter(({ labels }) =>
      Object.entries(where).every(([key, value]) => labels[key] === value));
    return fitting.length ? fitting.reduce((total, { value }) => total + value, 0) : null;
  }
}

// The pages of the last seconds, the oldest first.
export class Recent {
  constructor(seconds) {
    this.seconds = seconds;
    this.pages = [];
  }

  add(page) {
    this.pages.push(page);
    while (this.pages.length > 2 && this.pages[1].at <= page.at - this.seconds) this.pages.shift();
  }

  // The oldest page; null where there is only one.
  first() {
    return this.pages.length > 1 ? this.pages[0] : null;
  }
}

// The increase per second from one page to another; null where one of them lacks the metric.
export function rate(before, now, name, where = {}) {
  const first = before?.sum(name, where) ?? null;
  const last = now.sum(name, where);
  if (first === null || last === null || now.at <= before.at || last < first) return null;
  return (last - first) / (now.at - before.at);
}

// A quantile of a histogram's observations between two pages, linear within its bucket; null where there is none.
export function quantile(before, now, name, share) {
  const counts = new Map();
  for (const [page, sign] of [[now, 1], [before, -1]]) {
    for (const { labels, value } of page?.all(`${name}_bucket`) ?? []) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + sign * value);
    }
  }
  const bounds = [...counts.keys()].sort((a, b) => a - b);
  const total = counts.get(Infinity) ?? 0;
  if (!(total > 0)) return null;
  let below = 0;
  let lower = 0;
  for (const bound of bounds) {
    const upTo = counts.get(bound);
    if (upTo >= share * total) {
      if (bound === Infinity) return lower;
      return lower + (bound - lower) * ((share * total - below) / Math.max(upTo - below, 1));
    }
    below = upTo;
    lower = bound;
  }
  return null;
}
