// The flame graph, root on top. Each frame is a button, so that the keyboard, a screen reader and the page's own search reach it.

import { el, put, visible } from "./dom.js";
import { bytes, count, exact, percent } from "./units.js";

// Most frames drawn at once: beyond it the narrowest are left out and counted. Zooming shows them.
const FRAMES_MAX = 1500;
// Narrowest frame drawn, as a share of the view: half a pixel of a wide screen.
const SHARE_MIN = 0.0004;

// One colour per module, so that a library is recognised; nothing is shown by colour alone.
function hue(text) {
  let sum = 7;
  for (let index = 0; index < text.length; index += 1) sum = (sum * 31 + text.charCodeAt(index)) >>> 0;
  return sum % 6;
}

// `tree`: {name, total, self, children}; `changes` is the tree of the other time, to colour by the difference.
export function graph(node, tree, { unit = bytes, baseline = null } = {}) {
  let root = tree;
  let words = "";
  const path = new Map();
  (function remember(one, parent) {
    path.set(one, parent);
    for (const child of one.children ?? []) remember(child, one);
  })(tree, null);
  const total = tree.total;
  const search = el("input", {
    type: "search",
    placeholder: "Search functions",
    "aria-label": "Search functions",
    oninput: () => {
      words = search.value.toLowerCase();
      draw();
    },
  });
  const found = el("span", { class: "quiet", role: "status" });
  const reset = el(
    "button",
    {
      type: "button",
      onclick: () => {
        root = tree;
        draw();
      },
    },
    "Whole graph",
  );
  const area = el("div", { class: "flame", role: "tree", "aria-label": "Flame graph" });
  const reading = el("output", { class: "reading" });
  put(node, el("div", { class: "tools" }, search, reset, found), area, reading);

  const where = (one) =>
    [one.file ? `${visible(one.file)}${one.line ? `:${one.line}` : ""}` : "", one.module ? visible(one.module) : ""]
      .filter(Boolean)
      .join(" · ");
  const line = (one) =>
    `${visible(one.name)} · ${unit(one.total)} (${percent(one.total / Math.max(1, total), 1)}), itself ${unit(one.self ?? 0)}`;

  function draw() {
    const rows = [];
    let drawn = 0;
    let narrow = 0;
    let matched = 0;
    const above = [];
    for (let one = path.get(root); one; one = path.get(one)) above.unshift(one);
    const matches = (one) => words !== "" && String(one.name).toLowerCase().includes(words);
    const queue = [{ one: root, left: 0, width: 1, depth: above.length, inside: false }];
    above.forEach((one, depth) => {
      (rows[depth] ??= []).push(frame(one, 0, 1, true, matches(one)));
    });
    // Breadth first, so that the limit cuts the deepest.
    for (let at = 0; at < queue.length; at += 1) {
      const { one, left, width, depth, inside } = queue[at];
      const hit = matches(one);
      if (hit && !inside) matched += one.total;
      if (width < SHARE_MIN || drawn >= FRAMES_MAX) {
        narrow += 1;
        continue;
      }
      (rows[depth] ??= []).push(frame(one, left, width, false, hit));
      drawn += 1;
      let x = left;
      for (const child of one.children ?? []) {
        const share = child.total / Math.max(1, root.total);
        queue.push({ one: child, left: x, width: share, depth: depth + 1, inside: inside || hit });
        x += share;
      }
    }
    put(
      area,
      rows.map((row) => el("div", { class: "row" }, row)),
    );
    reset.disabled = root === tree;
    found.textContent = [
      words ? `found in ${unit(matched)} (${percent(matched / Math.max(1, root.total), 1)})` : "",
      narrow ? `${count(narrow)} frames are too narrow to show; zoom in to see them` : "",
    ]
      .filter(Boolean)
      .join(" · ");
    area.classList.toggle("searched", words !== "");
  }

  function frame(one, left, width, caller, hit) {
    const name = visible(one.name);
    const change = baseline?.get(key(one));
    const delta = baseline ? one.total - (change ?? 0) : 0;
    return el(
      "button",
      {
        type: "button",
        role: "treeitem",
        class: `frame tint-${hue(one.module || name.split("::")[0])}${caller ? " caller" : ""}${hit ? " hit" : ""}${baseline && delta > 0 ? " grew" : ""}${baseline && delta < 0 ? " shrank" : ""}`,
        style: { left: `${(left * 100).toFixed(4)}%`, width: `${(width * 100).toFixed(4)}%` },
        title: `${line(one)}${where(one) ? `\n${where(one)}` : ""}\n${exact(one.total)}`,
        "data-total": one.total,
        onclick: () => {
          root = one;
          draw();
        },
        onpointerenter: () => put(reading, line(one), where(one) ? el("span", { class: "quiet" }, ` ${where(one)}`) : null),
        onfocus: () => put(reading, line(one), where(one) ? el("span", { class: "quiet" }, ` ${where(one)}`) : null),
      },
      width > 0.02 ? name : "",
    );
  }

  const key = (one) => {
    const names = [];
    for (let at = one; at; at = path.get(at)) names.push(at.name);
    return names.join("\u0000");
  };

  draw();
}

// The stacks of a tree with values of their own, largest first, for the table next to the graph.
export function leaves(tree, most) {
  const all = [];
  (function walk(one, names, title) {
    const path = one === tree ? names : [one.name, ...names];
    // Frames of the allocator at the leaf are skipped for the title, unless there are no others.
    const skipped = one.allocates ? title + 1 : 0;
    if (one.self > 0) all.push({ value: one.self, names: path, title: skipped < path.length ? skipped : 0 });
    for (const child of one.children ?? []) walk(child, path, skipped);
  })(tree, [], 0);
  all.sort((a, b) => b.value - a.value);
  return { rows: all.slice(0, most), more: Math.max(0, all.length - most) };
}
