// Writes text into the page, never markup; markdown.js alone makes elements of a text.

export function byId(id) {
  return document.getElementById(id);
}

export function element(name, properties = {}) {
  return Object.assign(document.createElement(name), properties);
}

// Returns whether the text is on the clipboard. Its interface is there on https and localhost alone.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", { value: text, className: "offscreen" });
    const focused = document.activeElement;
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return copied;
  }
}

export function setText(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

export function show(id, shown) {
  byId(id).hidden = !shown;
}

// Fills a table's body; a cell is a text, or a node. On a phone cells show their column's name.
export function setRows(id, rows, empty) {
  const body = byId(id);
  const names = [...body.closest("table").tHead.rows[0].cells].map((cell) => cell.textContent);
  const wanted = rows.length ? rows : [[empty]];
  body.replaceChildren(...wanted.map((cells) => {
    const row = document.createElement("tr");
    for (const [index, cell] of cells.entries()) {
      const data = document.createElement("td");
      if (rows.length) data.dataset.name = names[index];
      if (cell instanceof Node) {
        data.className = "bar";
        data.append(cell);
      } else {
        data.textContent = cell;
      }
      row.append(data);
    }
    if (!rows.length) row.firstChild.colSpan = 9;
    return row;
  }));
}

// Fills a description list; `boxed` puts each pair in a box of its own.
export function setPairs(id, pairs, boxed = false) {
  byId(id).replaceChildren(...pairs.flatMap(([term, value]) => {
    const title = document.createElement("dt");
    const data = document.createElement("dd");
    title.textContent = term;
    data.textContent = value;
    if (!boxed) return [title, data];
    const box = document.createElement("div");
    box.append(title, data);
    return [box];
  }));
}

const SVG = "http://www.w3.org/2000/svg";

// A bar of a share of 0 to 1 and, behind it, that of what failed; with words, by default the share.
export function bar(share, { failed = 0, words = percent(share) } = {}) {
  const holder = document.createElement("span");
  const picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("viewBox", "0 0 100 10");
  picture.setAttribute("preserveAspectRatio", "none");
  picture.setAttribute("aria-hidden", "true");
  for (const [end, tone] of [[1, "var(--line)"], [share + failed, "var(--bad)"], [share, "var(--accent)"]]) {
    const box = document.createElementNS(SVG, "rect");
    box.setAttribute("width", String(100 * end));
    box.setAttribute("height", "10");
    box.setAttribute("fill", tone);
    picture.append(box);
  }
  holder.append(picture, words);
  return holder;
}

export function number(value, digits = 0) {
  return value === null || Number.isNaN(value) ? "–" : value.toFixed(digits);
}

export function percent(share) {
  return share === null || Number.isNaN(share) ? "–" : `${(100 * share).toFixed(1)} %`;
}

export function milliseconds(seconds) {
  return seconds === null || Number.isNaN(seconds) ? "–" : `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : 0)} ms`;
}

export function duration(seconds) {
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} days`;
}

export function bytes(value) {
  if (value === null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}
