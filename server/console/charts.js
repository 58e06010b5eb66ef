// Line charts of the last minutes with axes, and the values under a cursor.

const SVG = "http://www.w3.org/2000/svg";
// The time axis is the shortest of these that holds every sample.
const MINUTES = [1, 2, 5, 10];
const LONGEST_S = 600;
// A longer pause, such as that of a suspended host, is a gap in the line.
const GAP_S = 15;
const HEIGHT = 150;
const EDGE = { left: 46, right: 8, top: 8, bottom: 20 };

export class Chart {
  // `series` are names by class of line; `show` formats a value; `full` is the top where it is fixed.
  constructor(id, { series, show, full = null }) {
    this.figure = document.getElementById(id);
    this.svg = this.figure.querySelector("svg");
    this.title = this.figure.querySelector("figcaption").textContent;
    this.readout = this.figure.querySelector("output");
    Object.assign(this, { series: Object.entries(series), show, full, samples: [], cursor: null });
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    for (const name of ["pointerleave", "blur"]) this.svg.addEventListener(name, () => this.moveTo(null));
    this.svg.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  // Adds samples, the oldest first: `at` in seconds, one of `values` for each line, null for none.
  extend(samples) {
    this.samples.push(...samples);
    const begin = this.now() - LONGEST_S;
    while (this.samples[0].at < begin) {
      this.samples.shift();
      if (this.cursor !== null) this.cursor = Math.max(0, this.cursor - 1);
    }
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width || !this.samples.length) return;
    this.width = width;
    const age = this.now() - this.samples[0].at;
    this.minutes = MINUTES.find((minutes) => age <= 60 * minutes);
    this.top = this.full ?? niceTop(Math.max(0, ...this.samples.flatMap(({ values }) => values.map(Number))));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const lines = this.series.map(([kind], index) => node("path", { class: `line ${kind}`, d: this.path(index) }));
    this.svg.replaceChildren(...this.axes(), ...lines, ...this.marks());
    this.describe();
  }

  now() {
    return this.samples[this.samples.length - 1].at;
  }

  x(at) {
    return EDGE.left + (this.width - EDGE.left - EDGE.right) * (1 - (this.now() - at) / (60 * this.minutes));
  }

  y(value) {
    return HEIGHT - EDGE.bottom - (HEIGHT - EDGE.top - EDGE.bottom) * Math.min(1, value / this.top);
  }

  path(index) {
    let before = null;
    return this.samples.map(({ at, values }) => {
      if (values[index] === null) {
        before = null;
        return "";
      }
      // A point of its own shows, too: the caps of a line of no length are round.
      const begins = before === null || at - before > GAP_S;
      before = at;
      const place = `${this.x(at).toFixed(1)} ${this.y(values[index]).toFixed(1)}`;
      return begins ? `M${place}L${place}` : `L${place}`;
    }).join("");
  }

  axes() {
    const right = this.width - EDGE.right;
    const across = [0, 0.5, 1].flatMap((share) => {
      const y = this.y(share * this.top);
      return [
        node("line", { class: "grid", x1: EDGE.left, x2: right, y1: y, y2: y }),
        node("text", { x: EDGE.left - 6, y: y + 4, "text-anchor": "end" }, this.show(share * this.top)),
      ];
    });
    const minutes = [this.minutes, this.minutes / 2, 0].map((ago) => node("text", {
      x: this.x(this.now() - 60 * ago),
      y: HEIGHT - 4,
      "text-anchor": ago === this.minutes ? "start" : ago ? "middle" : "end",
    }, ago >= 1 ? `${ago} min ago` : ago ? `${60 * ago} s ago` : "now"));
    return [...across, ...minutes];
  }

  marks() {
    if (this.cursor === null) return [];
    const { at, values } = this.samples[this.cursor];
    const x = this.x(at);
    const dots = values.map((value, index) => value === null ? null
      : node("circle", { class: `dot ${this.series[index][0]}`, cx: x, cy: this.y(value), r: 3.5 }));
    return [
      node("line", { class: "cursor", x1: x, x2: x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
      ...dots.filter(Boolean),
    ];
  }

  // Writes the values under the cursor, else the latest; for screen readers also the highest.
  describe() {
    const { at, values } = this.samples[this.cursor ?? this.samples.length - 1];
    const ago = Math.round(this.now() - at);
    const when = this.cursor === null ? "now" : `${Math.floor(ago / 60)} min ${ago % 60} s ago`;
    const entries = this.series.map(([kind, name], index) => {
      const entry = document.createElement("span");
      entry.className = `key ${kind}`;
      entry.textContent = `${name ? `${name} ` : ""}${values[index] === null ? "–" : this.show(values[index])}`;
      return entry;
    });
    // Only values that the user points at are announced: the latest change every few seconds.
    this.readout.setAttribute("aria-live", this.cursor === null ? "off" : "polite");
    this.readout.replaceChildren(...entries, ` ${when}`);
    const highest = this.series.map(([, name], index) =>
      `${name} ${this.show(Math.max(0, ...this.samples.map((sample) => Number(sample.values[index]))))}`);
    this.svg.setAttribute("aria-label", `${this.title}, last ${this.minutes} min; at most ${highest.join(", ").trim()}`);
  }

  point(x) {
    const distances = this.samples.map(({ at }) => Math.abs(this.x(at) - x));
    this.moveTo(distances.length ? distances.indexOf(Math.min(...distances)) : null);
  }

  step(event) {
    const last = this.samples.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -15, PageDown: 15, Home: -last, End: last };
    if (event.key === "Escape") this.moveTo(null);
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    this.moveTo(Math.min(last, Math.max(0, (this.cursor ?? last) + moves[event.key])));
  }

  moveTo(cursor) {
    this.cursor = cursor;
    this.draw();
  }
}

// The least of 2, 5, 10, 20 … that is no less.
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 2)));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= Math.max(value, 2));
}

function node(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.textContent = text;
  return made;
}
