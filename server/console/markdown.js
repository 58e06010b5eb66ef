// Markdown of a model as elements of the page. The model's text is not trusted: marked makes HTML
// of it, DOMPurify keeps the elements and attributes listed here, and nothing of them loads.

import { Lexer, Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";

// What is longer or deeper stays plain, because a text is rendered again as it grows. marked takes
// time as the square of a paragraph's length: 31 s for 100,000 characters of "_a_a_a", and as long
// for "a.a.a". Quotes and lists on one line are parsed by recursion.
const MAX_CHARS = 50_000;
const MAX_PARAGRAPH_CHARS = 4000;
const NESTED = /^[ \t]*(?:>[ \t]*|(?:[-*+]|\d+[.)])[ \t]+){40}/m;
const TAGS = [
  ...["p", "br", "hr", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code"],
  ...["em", "strong", "del", "a", "table", "thead", "tbody", "tr", "th", "td", "#text"],
];
const SANITIZE = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

class BoundedLexer extends Lexer {
  inlineTokens(text, tokens = []) {
    if (text.length <= MAX_PARAGRAPH_CHARS) return super.inlineTokens(text, tokens);
    tokens.push({ type: "text", raw: text, text, escaped: false });
    return tokens;
  }
}

const marked = new Marked({
  gfm: true,
  breaks: true,
  hooks: { provideLexer: () => (text, options) => new BoundedLexer(options).lex(text) },
  renderer: {
    // HTML in an answer is text that the user reads, not a part of the page.
    html: ({ text }) => escape(text),
    image: ({ text, href }) => escape(text || href),
    // Below the headings of the page and of the turn.
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 3);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>\n`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.localName !== "a") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

// Replaces the content of `element`; text that cannot be rendered stays as it is.
export function showMarkdown(element, text) {
  try {
    if (text.length > MAX_CHARS || NESTED.test(text)) throw new RangeError("too long or too deep");
    element.replaceChildren(DOMPurify.sanitize(marked.parse(text), SANITIZE));
    element.classList.add("markdown");
  } catch {
    element.textContent = text;
    element.classList.remove("markdown");
  }
}

function escape(text) {
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (character) => entities[character]);
}
