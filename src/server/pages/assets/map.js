// The map of the address space: one cell per page or several pages, in the order of addresses, dark where it is live and bright where it is
// free. Canvas, because there are thousands of cells; the same figures are in the table below it and, by keyboard, in the line under it.

import { el, put } from "./dom.js";
import { table as pieceTable } from "./parts.js";
import { address, amount, bytes, count, percent } from "./units.js";

// Cells requested: what a wide screen shows at the smallest usable cell size.
const CELLS = 6000;
const CELL_PX_MIN = 5;
const CELL_PX_MAX = 15;
const GUTTER_PX = 118;
const HEAD_PX = 26;
const GAP_PX = 10;
// Time that a pointer rests on a cell before its stacks are requested, in milliseconds.
const REST_MS = 120;
const STEPS = ["live_bytes", "pinned_bytes", "trimmable_bytes", "kept_bytes", "other_bytes", "resident_bytes"];

// The colour ramp of a cell. The ramps are ordered by brightness, so that the map is readable without colour.
export function shade(cell, size) {
  if (cell.resident_bytes === 0) return { kind: "absent" };
  if (cell.live_bytes === 0) {
    if (cell.trimmable_bytes > 0 && cell.trimmable_bytes >= cell.kept_bytes) return { kind: "trimmable" };
    if (cell.kept_bytes > 0) return { kind: "kept" };
    return { kind: "rest" };
  }
  const share = cell.live_bytes / Math.max(1, Math.min(size, cell.live_bytes + cell.pinned_bytes + cell.trimmable_bytes + cell.kept_bytes));
  return { kind: "live", step: share >= 0.995 ? 0 : Math.min(5, 1 + Math.floor((1 - share) * 5)) };
}

function colours(node) {
  const style = getComputedStyle(node);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    live: [0, 1, 2, 3, 4, 5].map((step) => read(`--live-${step}`)),
    trimmable: read("--trimmable"),
    kept: read("--kept"),
    rest: read("--rest"),
    absent: read("--absent"),
    ink: read("--ink"),
    soft: read("--soft"),
    dots: read("--pattern"),
    line: read("--line"),
    focus: read("--focus"),
    panel: read("--panel"),
  };
}

const name = (piece) =>
  `${piece.allocator}, ${piece.arena === null || piece.arena === undefined ? "blocks with mappings of their own" : piece.arena === 0 ? "main arena" : `arena ${piece.arena}`}`;

// `load({from, to, cells})` returns the agent's answer; `onrange(from, to)` is called with the visible range, null for all;
// `stacks(from, to)` returns the element that shows the stacks of a range.
export function picture(node, { load, signal, range, onrange, stacks }) {
  const canvas = el("canvas", { tabindex: 0, role: "img", class: "map" });
  const facts = el("output", { class: "facts", "aria-live": "polite" });
  const owners = el("div", { class: "owners" });
  const notes = el("div");
  // Created once, so that they keep the keyboard focus when the map changes.
  const button = (name, onclick, title) => el("button", { type: "button", onclick, title }, name);
  const whole = button("Whole heap", () => zoom(null));
  const further = button("Wider", () => wider());
  const nearer = button("Zoom in", () => closer(cursor ?? densest()), "Around the marked cell, or where most is pinned");
  const rangeText = el("span");
  const crumbs = el("div", { class: "crumbs" }, whole, further, nearer, rangeText);
  const tableHead = el("summary");
  const tableBody = el("div");
  const table = el("details", { class: "alternative" }, tableHead, tableBody);
  put(node, key(), crumbs, el("div", { class: "mapframe" }, canvas), facts, owners, notes, table);

  let answer = null;
  let layout = null;
  let cursor = null; // { piece, cell }
  let drag = null;
  let shown = range ?? null;
  let busy = 0;
  let resting = 0;
  // The range whose stacks were requested last.
  let asked = "";

  async function fetchMap() {
    const mine = ++busy;
    const got = await load({ from: shown ? address(shown.from) : null, to: shown ? address(shown.to) : null, cells: CELLS });
    if (mine !== busy) return;
    answer = got;
    draw();
    describe();
  }

  function place() {
    const width = Math.max(260, canvas.parentElement.clientWidth);
    const gutter = width < 560 ? 0 : GUTTER_PX;
    const total = answer.pieces.reduce((sum, piece) => sum + piece.cells.length, 0);
    const wanted = Math.sqrt(((width - gutter) * 460) / Math.max(1, total));
    const px = Math.max(width < 560 ? CELL_PX_MIN : CELL_PX_MIN + 1, Math.min(CELL_PX_MAX, Math.floor(wanted)));
    // Round addresses at the start of rows: a power of two, or one and a half times it.
    const fit = Math.max(8, (width - gutter) / px);
    const power = 2 ** Math.floor(Math.log2(fit));
    const columns = power * 1.5 <= fit ? power * 1.5 : power;
    const size = Math.min(CELL_PX_MAX + 2, Math.floor((width - gutter) / columns));
    let y = 0;
    const places = answer.pieces.map((piece, index) => {
      const headed = index === 0 || name(piece) !== name(answer.pieces[index - 1]);
      y += headed ? (index === 0 ? 0 : GAP_PX) + HEAD_PX : 3;
      const top = y;
      y += Math.ceil(piece.cells.length / columns) * size;
      return { top, headed };
    });
    return { width, gutter, size, columns, height: Math.max(y, 20), places };
  }

  function draw() {
    if (!answer) return;
    layout = place();
    const ratio = Math.min(3, devicePixelRatio || 1);
    const { width, height, size, columns, gutter } = layout;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const ink = colours(canvas);
    context.clearRect(0, 0, width, height);
    context.textBaseline = "middle";
    const inner = size > 6 ? size - 1 : size - 0.5;
    answer.pieces.forEach((piece, index) => {
      const { top, headed } = layout.places[index];
      if (headed) {
        context.fillStyle = ink.ink;
        context.font = "600 12px system-ui, sans-serif";
        context.fillText(name(piece), 0, top - HEAD_PX / 2);
      }
      context.font = "10px ui-monospace, monospace";
      piece.cells.forEach((cell, at) => {
        const x = gutter + (at % columns) * size;
        const y = top + Math.floor(at / columns) * size;
        if (at % columns === 0 && gutter && size * 2 > 9 && (size >= 10 || Math.floor(at / columns) % Math.ceil(11 / size) === 0)) {
          context.fillStyle = ink.soft;
          context.fillText(address(piece.start + at * answer.cell_bytes), 0, y + size / 2);
        }
        paint(context, ink, cell, x, y, inner);
      });
    });
    mark(context, ink);
  }

  function paint(context, ink, cell, x, y, size) {
    const { kind, step } = shade(cell, answer.cell_bytes);
    if (kind === "absent") {
      context.strokeStyle = ink.absent;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
      return;
    }
    context.fillStyle = kind === "live" ? ink.live[step] : ink[kind];
    context.fillRect(x, y, size, size);
    if (size < 6) return;
    context.fillStyle = ink.dots;
    if (kind === "trimmable") {
      const r = size / 4;
      context.fillRect(x + size / 2 - r / 2, y + size / 2 - r / 2, r, r);
    } else if (kind === "kept") {
      context.fillRect(x + 1, y + size / 2 - 0.5, size - 2, 1);
    } else if (kind === "live" && step >= 3) {
      // Mostly pinned: a diagonal stroke.
      context.beginPath();
      context.moveTo(x + 1, y + size - 1);
      context.lineTo(x + size - 1, y + 1);
      context.lineWidth = 1;
      context.strokeStyle = ink.dots;
      context.stroke();
    }
  }

  function mark(context, ink) {
    const box = ({ piece, cell }) => {
      const { top } = layout.places[piece];
      return [layout.gutter + (cell % layout.columns) * layout.size, top + Math.floor(cell / layout.columns) * layout.size];
    };
    if (drag?.to) {
      const [low, high] = ordered(drag.from, drag.to);
      context.fillStyle = ink.focus;
      context.globalAlpha = 0.35;
      for (let piece = low.piece; piece <= high.piece; piece += 1) {
        const first = piece === low.piece ? low.cell : 0;
        const last = piece === high.piece ? high.cell : answer.pieces[piece].cells.length - 1;
        for (let cell = first; cell <= last; cell += 1) context.fillRect(...box({ piece, cell }), layout.size, layout.size);
      }
      context.globalAlpha = 1;
    }
    if (cursor) {
      const [x, y] = box(cursor);
      context.lineWidth = 2;
      context.strokeStyle = ink.panel;
      context.strokeRect(x - 2.5, y - 2.5, layout.size + 4, layout.size + 4);
      context.strokeStyle = ink.focus;
      context.strokeRect(x - 1, y - 1, layout.size + 1, layout.size + 1);
    }
  }

  const ordered = (a, b) => ((a.piece - b.piece || a.cell - b.cell) <= 0 ? [a, b] : [b, a]);
  const start = ({ piece, cell }) => answer.pieces[piece].start + cell * answer.cell_bytes;
  const size = ({ piece, cell }) => Math.min(answer.cell_bytes, answer.pieces[piece].end - start({ piece, cell }));
  const end = (at) => start(at) + size(at);

  function under(event) {
    if (!layout) return null;
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    for (let piece = layout.places.length - 1; piece >= 0; piece -= 1) {
      const { top } = layout.places[piece];
      if (y < top) continue;
      const column = Math.floor((x - layout.gutter) / layout.size);
      const cell = Math.floor((y - top) / layout.size) * layout.columns + column;
      return column >= 0 && column < layout.columns && cell < answer.pieces[piece].cells.length ? { piece, cell } : null;
    }
    return null;
  }

  function tell(from, to) {
    const [low, high] = ordered(from, to);
    const sum = Object.fromEntries(STEPS.map((step) => [step, 0]));
    let held = 0;
    for (let piece = low.piece; piece <= high.piece; piece += 1) {
      const first = piece === low.piece ? low.cell : 0;
      const last = piece === high.piece ? high.cell : answer.pieces[piece].cells.length - 1;
      for (let cell = first; cell <= last; cell += 1) {
        held += size({ piece, cell });
        for (const step of STEPS) sum[step] += answer.pieces[piece].cells[cell][step];
      }
    }
    put(
      facts,
      el("b", {}, `${address(start(low))} – ${address(end(high))}`),
      ` ${bytes(held)} · ${name(answer.pieces[low.piece])} · resident `,
      amount(sum.resident_bytes),
      " · ",
      el("span", { class: "swatch live" }),
      "live ",
      amount(sum.live_bytes),
      sum.resident_bytes ? ` (${percent(sum.live_bytes / sum.resident_bytes)})` : "",
      " · ",
      el("span", { class: "swatch pinned" }),
      "pinned ",
      amount(sum.pinned_bytes),
      " · ",
      el("span", { class: "swatch trimmable" }),
      "trimmable ",
      amount(sum.trimmable_bytes),
      sum.kept_bytes ? [" · ", el("span", { class: "swatch kept" }), "kept ", amount(sum.kept_bytes)] : null,
    );
    if (stacks) own(start(low), end(high));
  }

  // Requested when the pointer rests: a range that the pointer has left is not drawn.
  function own(from, to) {
    const key = `${address(from)}-${address(to)}`;
    if (asked === key) return;
    asked = key;
    clearTimeout(resting);
    resting = setTimeout(async () => {
      const found = await stacks(address(from), address(to)).catch((error) => error.message);
      if (asked !== key) return;
      put(owners, found);
      owners.dataset.range = key;
    }, REST_MS);
  }

  function zoom(from, to) {
    shown = from === null ? null : { from, to };
    cursor = null;
    onrange?.(shown);
    fetchMap().catch(report);
  }

  function report(error) {
    if (error.name !== "AbortError") put(notes, el("p", { class: "notice" }, `The map is not available: ${error.message}`));
  }

  canvas.addEventListener("pointermove", (event) => {
    const at = under(event);
    if (drag) {
      if (at) {
        drag.to = at;
        tell(drag.from, at);
        draw();
      }
    } else if (at && (at.piece !== cursor?.piece || at.cell !== cursor?.cell)) {
      cursor = at;
      tell(at, at);
      draw();
    }
  });
  canvas.addEventListener("pointerdown", (event) => {
    const at = under(event);
    if (!at || event.button !== 0 || event.pointerType === "touch") {
      if (at) {
        cursor = at;
        tell(at, at);
        draw();
      }
      return;
    }
    drag = { from: at, to: null };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => {
    const done = drag;
    drag = null;
    if (!done?.to) return;
    const [low, high] = ordered(done.from, done.to);
    if (low.piece !== high.piece || low.cell !== high.cell) zoom(start(low), end(high));
    else draw();
  });
  canvas.addEventListener("dblclick", (event) => {
    const at = under(event);
    if (at) closer(at);
  });
  canvas.addEventListener("keydown", (event) => {
    if (!answer?.pieces.length) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -layout.columns, ArrowDown: layout.columns, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      event.preventDefault();
      cursor = cursor ? step(cursor, moves[event.key]) : { piece: 0, cell: 0 };
      tell(cursor, cursor);
      draw();
    } else if ((event.key === "Enter" || event.key === "+") && cursor) {
      event.preventDefault();
      closer(cursor);
    } else if (event.key === "-" || event.key === "Escape") {
      event.preventDefault();
      wider();
    }
  });

  function step(at, by) {
    if (by === -Infinity) return { piece: 0, cell: 0 };
    if (by === Infinity) return { piece: answer.pieces.length - 1, cell: answer.pieces.at(-1).cells.length - 1 };
    let { piece, cell } = { ...at, cell: at.cell + by };
    while (cell < 0 && piece > 0) {
      piece -= 1;
      cell += answer.pieces[piece].cells.length;
    }
    while (cell >= answer.pieces[piece].cells.length && piece < answer.pieces.length - 1) {
      cell -= answer.pieces[piece].cells.length;
      piece += 1;
    }
    return { piece, cell: Math.max(0, Math.min(answer.pieces[piece].cells.length - 1, cell)) };
  }

  // An eighth of the visible range, around a cell; not smaller than pages.
  function closer(at) {
    const piece = answer.pieces[at.piece];
    if (answer.cell_bytes <= answer.page_bytes) return;
    const reach = Math.max(32, Math.ceil(piece.cells.length / 16)) * answer.cell_bytes;
    const middle = start(at);
    zoom(Math.max(piece.start, middle - reach), Math.min(piece.end, middle + reach));
  }

  function wider() {
    if (!shown) return;
    const reach = (shown.to - shown.from) * 4;
    const middle = (shown.from + shown.to) / 2;
    if (reach > (answer.whole_bytes ?? Infinity)) zoom(null);
    else zoom(Math.max(0, Math.floor(middle - reach)), Math.ceil(middle + reach));
  }

  function describe() {
    const sums = answer.pieces.map((piece) =>
      piece.cells.reduce(
        (sum, cell) => {
          for (const step of STEPS) sum[step] += cell[step];
          return sum;
        },
        Object.fromEntries(STEPS.map((step) => [step, 0])),
      ),
    );
    const all = sums.reduce(
      (one, sum) => Object.fromEntries(STEPS.map((step) => [step, one[step] + sum[step]])),
      Object.fromEntries(STEPS.map((step) => [step, 0])),
    );
    const held = answer.pieces.reduce((sum, piece) => sum + (piece.end - piece.start), 0);
    canvas.setAttribute(
      "aria-label",
      `Address space of ${count(answer.pieces.length)} pieces, ${bytes(held)}: resident ${bytes(all.resident_bytes)}, live ${bytes(all.live_bytes)}, pinned ${bytes(all.pinned_bytes)}, trimmable ${bytes(all.trimmable_bytes)}. Arrow keys move, Enter zooms in, Escape goes back.`,
    );
    canvas.dataset.cells = answer.pieces.reduce((sum, piece) => sum + piece.cells.length, 0);
    for (const step of STEPS) canvas.dataset[step.replace("_bytes", "")] = all[step];
    whole.disabled = further.disabled = !shown;
    nearer.disabled = answer.cell_bytes <= answer.page_bytes;
    rangeText.textContent = `${shown ? `${address(shown.from)} – ${address(shown.to)}` : "all of it"} · one cell = ${bytes(answer.cell_bytes)}${
      answer.cell_bytes > answer.page_bytes ? "" : ", a page"
    }`;
    put(
      notes,
      answer.pages_dropped > 0
        ? el("p", { class: "notice" }, `${count(answer.pages_dropped)} pages are beyond the limit of the map and are not shown.`)
        : null,
    );
    tableHead.textContent = `The same as a table: ${count(answer.pieces.length)} ${answer.pieces.length === 1 ? "piece" : "pieces"}`;
    const row = (piece, index) =>
      el(
        "tr",
        {},
        el("td", { class: "mono" }, `${address(piece.start)} – ${address(piece.end)}`),
        el("td", {}, name(piece)),
        [
          piece.end - piece.start,
          sums[index].resident_bytes,
          sums[index].live_bytes,
          sums[index].pinned_bytes,
          sums[index].trimmable_bytes,
        ].map((value) => el("td", { class: "number" }, amount(value))),
        el("td", {}, button("Look", () => zoom(piece.start, piece.end))),
      );
    put(
      tableBody,
      pieceTable(["Addresses", "Of", "Size", "Resident", "Live", "Pinned", "Trimmable", ""], answer.pieces.slice(0, ROWS_MAX).map(row)),
      answer.pieces.length > ROWS_MAX ? el("p", { class: "quiet" }, `and ${count(answer.pieces.length - ROWS_MAX)} more`) : null,
    );
  }

  function densest() {
    let best = { piece: 0, cell: 0 };
    answer.pieces.forEach((piece, index) =>
      piece.cells.forEach((cell, at) => {
        if (cell.pinned_bytes > answer.pieces[best.piece].cells[best.cell].pinned_bytes) best = { piece: index, cell: at };
      }),
    );
    return best;
  }

  const observer = new ResizeObserver(() => draw());
  observer.observe(canvas.parentElement);
  signal.addEventListener("abort", () => observer.disconnect());
  document.addEventListener("theme", draw, { signal });

  return { refresh: fetchMap, report };
}

// Rows of the table with the same figures.
const ROWS_MAX = 200;

function key() {
  return el(
    "div",
    { class: "key", "aria-label": "Legend of the map" },
    el(
      "span",
      { class: "ramp" },
      el("span", {}, "live 100 %"),
      [0, 1, 2, 3, 4, 5].map((step) => el("i", { class: `cell live-${step}` })),
      el("span", {}, "a few live bytes pin the rest"),
    ),
    el("span", {}, el("i", { class: "cell trimmable" }), "whole page free, trimmable"),
    el("span", {}, el("i", { class: "cell kept" }), "free, kept by a trim"),
    el("span", {}, el("i", { class: "cell absent" }), "not resident"),
    el("span", {}, el("i", { class: "cell rest" }), "allocator's own"),
  );
}
