// Elements. All text from watched processes passes through here: nothing on these pages is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

// `on…` keys are listeners, `class`, `data-…`, `aria-…` and the like are attributes; null and false leave an attribute out.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

export function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
}

export const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Replaces the children of a node.
export function put(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

// Text of a target for one line: control and direction characters are shown as escapes, so that no name can reorder or hide what
// is next to it.
export function visible(text) {
  return String(text ?? "").replace(
    /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/gu,
    (c) => `\\u{${c.codePointAt(0).toString(16)}}`,
  );
}
