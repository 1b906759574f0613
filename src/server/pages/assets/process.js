// One process: the verdict in words, the ladder now and over time, the address space, arenas, size classes, stacks.

import * as api from "./api.js";
import * as chart from "./chart.js";
import { el, put, visible } from "./dom.js";
import * as flame from "./flame.js";
import { bar, legend, stepsOf } from "./ladder.js";
import { chip, home, verdictOf } from "./list.js";
import * as map from "./map.js";
import { address, amount, bytes, clock, count, duration, exact, instant, percent, signed } from "./units.js";
import { KINDS, NOT_MALLOC, SOURCES, VERDICTS } from "./words.js";

// Points asked for of the time axis: one for two or three pixels of a wide screen.
const POINTS = 400;
const SPANS = [["1h", 3600], ["6h", 21600], ["24h", 86400], ["7d", 604800]];
// Rows of a table that are shown at once; the rest is summed in a line.
const ROWS_MAX = 24;
// Length of a recording that is asked for here, in seconds.
const RECORD_S = 10;
// The names of the tiers as the API has them, in the words of the pages.
const TIERS = { exact: "exact", sampled: "emitter", governed: "governed", imported: "exact", census: "census" };

const source = (name, ...more) => el("span", { class: "source", title: SOURCES[name], "data-source": name }, el("b", {}, name), more);
const section = (id, title, said) => {
  const body = el("div");
  const from = el("span", { class: "source" });
  return { node: el("section", { class: "card", id, "aria-label": title }, el("header", {}, el("h2", {}, title), said ? el("span", { class: "quiet" }, said) : null, from), body), body, from };
};
const sorry = (body, error) => put(body, el("p", { class: "quiet" }, error instanceof api.Refused ? error.message : `This part failed: ${error.message}`));
const pairs = (list) => el("dl", { class: "evidence" }, list.filter(Boolean).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));

export function open({ main, trail, signal, settings, argument: pid }) {
  const head = el("section", { class: "card verdict", id: "verdict", "aria-label": "Verdict" }, el("p", { class: "quiet" }, "Asking…"));
  const where = section("where", "Where the memory is", "what the process has in RAM, and what its heaps are");
  const time = section("time", "Over time");
  const space = section("space", "Address space", "each cell a page or more, in the order of addresses");
  const stacks = section("stacks", "Call stacks", "who holds it");
  const arenas = section("arenas", "Arenas");
  const sizes = section("sizes", "Size classes", "chunks by size, with the allocator's rounding");
  const quality = section("quality", "Evidence", "what was looked at, what was lost, what is in doubt");
  const all = [["verdict", "Verdict"], ["where", "Memory"], ["time", "Over time"], ["space", "Address space"], ["stacks", "Stacks"], ["arenas", "Arenas"], ["sizes", "Sizes"], ["quality", "Evidence"]];
  put(main, head, el("nav", { class: "jump", "aria-label": "Parts of this page" }, all.map(([id, name]) =>
    el("a", { href: `#${id}`, onclick: (event) => { event.preventDefault(); document.getElementById(id)?.scrollIntoView({ block: "start" }); } }, name))),
  where.node, time.node, space.node, stacks.node, arenas.node, sizes.node, quality.node);

  let closest = "";
  let loaded = false;

  const keep = () => history.replaceState(null, "", settings.size ? `#/p/${pid}?${settings}` : `#/p/${pid}`);
  const set = (name, value) => {
    if (value === null || value === undefined) settings.delete(name);
    else settings.set(name, value);
    keep();
  };

  const timeView = overTime(time, { pid, signal, settings, set });
  const stackView = callStacks(stacks, { pid, signal, settings, set });
  let picture = null;

  async function closer(one) {
    // The inside of the heap changes only with a close census: no need to ask for it each time.
    const key = (one.censuses ?? []).filter((census) => census.level !== "top").map((census) => census.at_unix_s).join();
    if (key === closest && loaded) return;
    closest = key;
    loaded = true;
    const range = settings.get("from") && settings.get("to") ? { from: Number(settings.get("from")), to: Number(settings.get("to")) } : null;
    picture ??= map.picture(space.body, { signal, range, load: async (values) => {
      const got = await api.map(pid, values, signal);
      put(space.from, source("census", `taken ${clock(got.at_unix_s)}`));
      return mapOf(got);
    }, onrange: (to) => { set("from", to ? address(to.from) : null); set("to", to ? address(to.to) : null); } });
    await Promise.allSettled([
      api.heap(pid, signal).then((heap) => { drawArenas(arenas, heap); drawSizes(sizes, heap); drawQuality(quality, one, heap); },
        (error) => { for (const part of [arenas, sizes]) sorry(part.body, error); drawQuality(quality, one, null); }),
      picture.refresh().catch((error) => { if (error.name === "AbortError") return; picture = null; sorry(space.body, error); }),
      api.explain(pid, signal).then((said) => drawVerdict(head, one, said), () => drawVerdict(head, one, null)),
    ]);
  }

  return {
    async refresh() {
      const one = await api.process(pid, signal);
      document.title = `${visible(one.comm)} (${pid}) – fragprof`;
      put(trail, el("span", {}, visible(one.comm)), el("span", { class: "quiet" }, `pid ${pid}`));
      if (!loaded) drawVerdict(head, one, null);
      drawWhere(where, one);
      await Promise.all([closer(one), timeView.refresh(), stackView.refresh(one)]);
      const ages = (one.censuses ?? []).map((census) => census.age_s);
      return ages.length ? `looked at ${duration(Math.min(...ages))} ago` : "not looked at yet";
    },
    failed(error) {
      if (error instanceof api.Refused && error.status === 404) {
        put(head, el("h1", {}, `Process ${pid}`), el("p", { class: "notice" }, error.message), el("p", {}, el("a", { href: "#/" }, "All processes")));
      }
    },
    settings() {},
  };
}

function drawVerdict(head, one, said) {
  const short = verdictOf(one);
  const verdict = said ?? short;
  const steps = one.ladder ? stepsOf(one.ladder) : null;
  const limit = one.memory_limit;
  put(head,
    el("div", { class: "head" }, el("h1", {}, visible(one.comm) || "(no name)"), verdict ? chip(verdict) : null,
      verdict?.confidence ? el("span", { class: "quiet" }, `confidence ${visible(verdict.confidence)}`) : null),
    el("p", { class: "facts-line" }, el("span", {}, `pid ${one.pid}`), el("span", {}, `uid ${one.uid}`), home(one) ? el("span", {}, home(one)) : null,
      (one.heaps ?? []).map((heap) => el("span", {}, visible(heap.allocator))), one.state !== "watched" ? el("span", {}, `${visible(one.state).replace("_", " ")}${one.reason ? `: ${visible(one.reason)}` : ""}`) : null),
    verdict?.summary ? el("p", { class: "said" }, visible(verdict.summary)) : el("p", { class: "said quiet" }, VERDICTS[verdict?.verdict]?.text ?? "No close look yet: the verdict comes with the first full census."),
    limit ? el("p", { class: limit.used_ratio > 0.9 ? "notice" : "quiet" }, `Its limit is ${bytes(limit.limit_bytes)}, of which ${percent(limit.used_ratio)} are used`,
      limit.seconds_to_limit_est != null ? `; at this growth it is reached in about ${duration(limit.seconds_to_limit_est)}` : "", limit.oom_kills ? `; ${count(limit.oom_kills)} killed there so far` : "", ".") : null,
    said || steps ? el("div", { class: "columns" },
      el("div", {}, el("h3", {}, "The numbers it rests on"), evidence(one, said, steps)),
      said?.remedies?.length ? el("div", {}, el("h3", {}, "What would help"), el("ul", { class: "remedies" }, said.remedies.map((remedy) =>
        el("li", {}, el("b", {}, remedy.predicted_bytes === null ? el("span", { class: "unknown", title: "cannot be told" }, "?") : amount(remedy.predicted_bytes, "predicted")),
          el("span", {}, visible(remedy.action), el("span", { class: "quiet" }, ` (${visible(remedy.basis)})`)))))) : null,
      said?.unknowns?.length ? el("div", {}, el("h3", {}, "Not known"), el("ul", { class: "doubts quiet" }, said.unknowns.map((text) => el("li", {}, visible(text))))) : null) : null,
    el("p", { class: "source" }, source("census"), one.growth ? source("history") : null));
}

function evidence(one, said, steps) {
  const from = said?.evidence ?? { rss_bytes: one.rss_bytes, ...steps, fragmentation_ratio: one.fragmentation_ratio };
  const change = from.change ?? null;
  const growth = one.growth;
  return pairs([
    ["Process resident", amount(from.rss_bytes)], from.not_malloc_bytes !== undefined ? ["Not malloc", amount(from.not_malloc_bytes)] : null,
    ["Heap extent", amount(from.extent_bytes)], ["Heap resident", amount(from.resident_bytes)],
    from.live_bytes_est != null ? ["Live, estimated", ["≈ ", amount(from.live_bytes_est), ` ± ${bytes(from.live_bytes_stderr)}`]] : ["Live", amount(from.live_bytes)],
    ["Trimmable", amount(from.trimmable_bytes)], ["Pinned", amount(from.pinned_bytes)], from.kept_bytes ? ["Kept", amount(from.kept_bytes)] : null,
    from.swapped_bytes ? ["Swapped", amount(from.swapped_bytes)] : null, from.huge_bytes ? ["In huge pages", amount(from.huge_bytes)] : null,
    from.fragmentation_ratio != null ? ["Fragmentation ratio", el("data", { value: from.fragmentation_ratio, title: "1 − live / resident" }, from.fragmentation_ratio.toFixed(3))] : null,
    growth ? [`Live over ${duration(growth.seconds)}`, el("data", { value: growth.live_bytes_delta, title: `${exact(growth.live_bytes_delta)}, low-water marks of ${count(growth.censuses)} censuses` }, signed(growth.live_bytes_delta))]
      : change ? [`Live over ${duration(change.seconds)}`, signed(change.live_bytes_delta)] : null,
  ]);
}

function drawWhere(part, one) {
  const steps = one.ladder ? stepsOf(one.ladder) : null;
  const rows = [];
  const scale = Math.max(one.rss_bytes, steps?.extent_bytes ?? 0, 1);
  const track = (pieces) => el("div", { class: "track" }, pieces.map(([name, value, title]) => el("span", { class: name, style: { width: `${((value / scale) * 100).toFixed(3)}%` }, title: `${title}: ${exact(value)}` })));
  const row = (name, value, pieces, title) => rows.push(el("span", { class: "name", title }, name), track(pieces), el("span", { class: "value" }, amount(value)));
  const besides = [...(one.not_malloc ?? [])].sort((a, b) => b.resident_bytes - a.resident_bytes);
  row("Process", one.rss_bytes, [["resident", steps ? Math.min(steps.resident_bytes, one.rss_bytes) : 0, "malloc's heaps"], ["other", Math.max(0, one.rss_bytes - (steps?.resident_bytes ?? 0)), "not malloc"]], "All resident bytes, the kernel's figure");
  if (steps) {
    row("Heap extent", steps.extent_bytes, [["extent", steps.extent_bytes, "address space that the allocators hold"]], "Address space that the allocators hold");
    row("Heap resident", steps.resident_bytes, [["resident", steps.resident_bytes, "of the extent, in memory"]], "Of the extent, in memory");
  }
  const ladders = (one.heaps ?? []).map((heap) => {
    const own = stepsOf(heap);
    const full = el("div", { class: "tall" });
    bar(full, own, own.extent_bytes, true);
    return el("div", {}, el("h3", {}, visible(heap.allocator), el("span", { class: "quiet" }, ` extent ${bytes(own.extent_bytes)}, resident ${bytes(own.resident_bytes)}, ${count(heap.arenas)} ${heap.arenas === 1 ? "arena" : "arenas"}`)), full, legend(own));
  });
  put(part.body, el("div", { class: "waterfall" }, rows), ladders,
    besides.length ? [el("h3", {}, "Resident, and not malloc's"), el("table", { class: "plain" }, el("tbody", {}, besides.map((kind) => el("tr", {}, el("td", {}, NOT_MALLOC[kind.kind] ?? visible(kind.kind)), el("td", { class: "number" }, amount(kind.resident_bytes)), el("td", { class: "number quiet" }, `${count(kind.mappings)} mappings`)))))] : null);
  const newest = [...(one.censuses ?? [])].sort((a, b) => a.age_s - b.age_s)[0];
  put(part.from, source("kernel"), source("census", newest ? `${visible(newest.level)}, ${duration(newest.age_s)} ago` : "none yet"));
}

// The answer of `/map` as the picture wants it: cells by name, addresses as numbers.
export function mapOf(got) {
  const named = (cell) => Object.fromEntries(got.columns.map((column, index) => [column, cell[index]]));
  const pieces = got.pieces.map((piece) => ({ ...piece, start: Number(piece.start), end: Number(piece.end), allocator: visible(piece.allocator), cells: piece.cells.map(named) }));
  return { ...got, pieces };
}

function overTime(part, { pid, signal, settings, set }) {
  let points = [];
  let marks = [];
  let span = SPANS.find(([name]) => name === settings.get("span")) ?? SPANS[0];
  const picture = el("div");
  const difference = el("div", { "aria-live": "polite" });
  const spans = el("div", { class: "switch", role: "group", "aria-label": "Time shown" }, SPANS.map((one) => el("button", { type: "button", "data-span": one[0], "aria-pressed": String(one === span), onclick: () => {
    span = one;
    set("span", one[0]);
    for (const button of spans.children) button.setAttribute("aria-pressed", String(button.dataset.span === one[0]));
    marks = [];
    refresh();
  } }, one[0])));
  put(part.body, el("div", { class: "tools" }, spans, el("span", { class: "quiet" }, "solid areas: resident; dashed: extent; dotted: the process. Click two times, or press Enter, to compare them.")), picture, difference);

  function draw() {
    chart.draw(picture, points, { marks, onpick: (index) => {
      marks = marks.length >= 2 ? [index] : [...marks, index].sort((a, b) => a - b);
      draw();
    } });
    drawDifference(difference, points, marks, { pid, signal, by: settings.get("by") ?? "live" });
  }

  // The picture is drawn for the width that it has.
  const observer = new ResizeObserver(() => { if (points.length) draw(); });
  observer.observe(part.body);
  signal.addEventListener("abort", () => observer.disconnect());

  async function refresh() {
    let got;
    try {
      got = await api.history(pid, { from: -span[1], points: POINTS }, signal);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      sorry(picture, error);
      return;
    }
    const chosen = marks.map((index) => points[index]?.at_unix_s);
    points = pointsOf(got);
    marks = chosen.map((at) => points.findIndex((one) => one.at_unix_s >= at)).filter((index) => index >= 0);
    put(part.from, source("history", `${count(points.length)} samples`));
    draw();
  }
  return { refresh };
}

// The answer of `/history`, which comes in columns, as points.
export function pointsOf(got) {
  const columns = Object.keys(got).filter((key) => key !== "at_unix_s" && Array.isArray(got[key]) && got[key].length === got.at_unix_s.length);
  return got.at_unix_s.map((at_unix_s, index) => {
    const row = Object.fromEntries(columns.map((key) => [key, got[key][index]]));
    return { at_unix_s, rss_bytes: row.rss_bytes ?? null, steps: { ...stepsOf(row), extent_bytes: row.extent_bytes ?? 0, resident_bytes: row.resident_bytes ?? 0 } };
  });
}

const STEP_NAMES = [["rss_bytes", "Process resident"], ["extent_bytes", "Heap extent"], ["resident_bytes", "Heap resident"], ["live_bytes", "Live"], ["pinned_bytes", "Pinned"], ["trimmable_bytes", "Trimmable"], ["kept_bytes", "Kept"]];

function drawDifference(node, points, marks, { pid, signal, by }) {
  if (marks.length < 2) {
    put(node, marks.length ? el("p", { class: "quiet" }, `A is ${instant(points[marks[0]].at_unix_s)}; choose another time.`) : null);
    return;
  }
  const [a, b] = marks.map((index) => points[index].at_unix_s);
  api.diff(pid, { from: a, to: b, by }, signal).then((got) => {
    const rows = STEP_NAMES.filter(([key]) => key in got.delta_bytes).map(([key, name]) => el("tr", { "data-step": key }, el("th", { scope: "row" }, name),
      [got.from[key], got.to[key]].map((value) => el("td", { class: "number" }, amount(value))),
      el("td", { class: "number" }, el("data", { value: got.delta_bytes[key], title: exact(got.delta_bytes[key]) }, signed(got.delta_bytes[key])))));
    put(node, el("h3", {}, `Difference over ${duration(got.to.at_unix_s - got.from.at_unix_s)}`), el("div", { class: "scroll" }, el("table", { class: "plain difference" },
      el("thead", {}, el("tr", {}, [" ", `A ${instant(got.from.at_unix_s)}`, `B ${instant(got.to.at_unix_s)}`, "Change"].map((head, index) => el("th", { scope: "col", class: index ? "number" : "" }, head)))), el("tbody", {}, rows))),
    got.stacks ? stackDifference(got.stacks) : el("p", { class: "quiet" }, "By stack there is nothing to compare: no profiles are kept of these two times."));
  }, (error) => error.name === "AbortError" || put(node, el("p", { class: "quiet" }, error.message)));
}

function stackDifference(got) {
  const left = got.stacks_changed - Math.min(got.stacks.length, ROWS_MAX);
  return [el("h3", {}, `By stack, ${visible(got.by)}: ${bytes(got.old_total)} then, ${bytes(got.new_total)} by now`),
    el("table", { class: "plain stacktable" }, el("tbody", {}, got.stacks.slice(0, ROWS_MAX).map((row) =>
      el("tr", {}, el("td", { class: "number" }, el("data", { value: row.delta, title: exact(row.delta) }, signed(row.delta))), el("td", {}, stackCell(row.frames)))))),
    left > 0 ? el("p", { class: "quiet" }, `and ${count(left)} stacks more`) : null];
}

const stackCell = (names) => [el("b", {}, visible(names[0] ?? "")), names.length > 1 ? el("div", { class: "path" }, names.slice(1).map(visible).join(" ← ")) : null];

function callStacks(part, { pid, signal, settings, set }) {
  let kind = KINDS.find((one) => one.key === settings.get("by")) ?? KINDS[0];
  let shown = "";
  const area = el("div");
  const kinds = el("div", { class: "switch", role: "group", "aria-label": "By what" }, KINDS.map((one) => el("button", { type: "button", "data-by": one.key, title: one.text, "aria-pressed": String(one === kind), onclick: () => {
    kind = one;
    set("by", one.key);
    for (const button of kinds.children) button.setAttribute("aria-pressed", String(button.dataset.by === one.key));
    shown = "";
    load().catch((error) => error.name === "AbortError" || sorry(area, error));
  } }, one.name)));
  const record = el("button", { type: "button", class: "record", title: "Every allocation and free with its stack, for some seconds. Costs the process about 2 µs for each while it lasts." }, `Record ${RECORD_S} s`);
  put(part.body, el("div", { class: "tools" }, kinds, record), area);

  // `more` are parameters beside the kind: `seconds` asks for a recording, which is shown until another is chosen.
  async function load(more = {}) {
    const wanted = kind;
    let got;
    try {
      got = await api.profile(pid, { by: wanted.key, ...more }, signal);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      put(area, el("p", { class: "quiet" }, error.message), el("p", { class: "quiet" }, "A census knows every block, but not who asked for it. A recording does; it costs the process about 2 µs for each allocation while it runs."));
      return;
    }
    if (wanted === kind) draw(got);
  }

  function draw(got) {
    const { tree } = got;
    const unit = got.unit === "count" ? count : bytes;
    const tier = TIERS[got.mode] ?? visible(got.mode);
    put(part.from, source(tier, `${clock(got.at_unix_s)}, over ${duration(got.duration_s)}`));
    const graph = el("div");
    const { rows, more } = flame.leaves(tree.root, ROWS_MAX);
    const lost = Object.entries(got.losses).filter(([, value]) => value > 0);
    put(area, el("p", { class: "quiet" }, `${kind.name}: ${kind.text}. In all `, el("data", { value: got.total, title: got.unit === "count" ? "" : exact(got.total), class: "total" }, unit(got.total)), "."),
      el("p", { class: lost.length ? "notice" : "quiet" }, lost.length ? `Lost: ${lost.map(([name, value]) => `${visible(name).replaceAll("_", " ")} ${count(value)}`).join(", ")}` : "Losses: none."),
      got.doubts.map((text) => el("p", { class: "notice" }, `In doubt: ${visible(text)}`)), got.limits.map((text) => el("p", { class: "quiet" }, visible(text))), graph,
      tree.pruned_nodes ? el("p", { class: "quiet" }, `${count(tree.pruned_nodes)} small frames were left out by the agent; their bytes are in their callers.`) : null,
      el("details", { open: true }, el("summary", {}, "The same as a table"), el("table", { class: "plain stacktable" }, el("tbody", {}, rows.map((row) =>
        el("tr", {}, el("td", { class: "number" }, got.unit === "count" ? count(row.value) : amount(row.value)), el("td", { class: "number quiet" }, percent(row.value / Math.max(1, got.total), 1)), el("td", {}, stackCell(row.names)))))),
      more ? el("p", { class: "quiet" }, `and ${count(more)} stacks more`) : null));
    flame.graph(graph, tree.root, { unit });
  }

  record.addEventListener("click", async () => {
    record.disabled = true;
    record.textContent = `Recording ${RECORD_S} s…`;
    try {
      await load({ seconds: RECORD_S });
    } catch {
      // Left for another page.
    }
    record.disabled = false;
    record.textContent = `Record ${RECORD_S} s`;
  });

  return {
    async refresh(one) {
      const key = (one.profiles ?? []).map((profile) => `${profile.mode}${profile.at_unix_s}`).join() || "none";
      if (key === shown) return;
      shown = key;
      await load();
    },
  };
}

function drawArenas(part, heap) {
  const all = heap.heaps.flatMap((one) => one.arenas.map((arena, index) => ({ ...arena, name: `${visible(one.allocator)} ${index}` })));
  all.sort((a, b) => b.extent_bytes - a.extent_bytes);
  const most = Math.max(1, ...all.map((arena) => arena.extent_bytes));
  const row = (arena) => {
    const line = el("div", { class: "track" }, [["live", arena.live_bytes], ["kept", arena.cached_bytes], ["pinned", arena.free_bytes], ["trimmable", arena.top_bytes]].map(([name, value]) =>
      el("span", { class: `part ${name}`, style: { width: `${((value / most) * 100).toFixed(3)}%` } })));
    line.className = "ladder inline";
    return el("tr", {}, el("td", {}, arena.name, " ", el("span", { class: "mono quiet" }, address(arena.address))), el("td", {}, line), [arena.extent_bytes, arena.resident_bytes, arena.live_bytes, arena.free_bytes, arena.cached_bytes, arena.top_bytes].map((value) => el("td", { class: "number" }, amount(value))),
      el("td", { class: "number" }, count(arena.attached_threads)), el("td", { class: "number" }, count(arena.pieces)));
  };
  put(part.body, all.length ? el("div", { class: "scroll" }, el("table", { class: "plain" }, el("thead", {}, el("tr", {}, ["Arena", "Live, free, cached, end", "Extent", "Resident", "Live", "Free", "Cached", "End", "Threads", "Pieces"].map((name, index) => el("th", { scope: "col", class: index > 1 ? "number" : "" }, name)))),
    el("tbody", {}, all.slice(0, ROWS_MAX).map(row)))) : el("p", { class: "quiet" }, "This allocator has no arenas that are told apart."),
  all.length > ROWS_MAX ? el("p", { class: "quiet" }, `and ${count(all.length - ROWS_MAX)} smaller arenas`) : null);
  put(part.from, source("census", visible(heap.level)));
}

function drawSizes(part, heap) {
  const all = heap.heaps.flatMap((one) => one.size_classes.map((size) => ({ ...size, allocator: visible(one.allocator) })));
  const most = Math.max(1, ...all.map((size) => size.live_bytes + size.free_bytes));
  put(part.body, all.length ? el("div", { class: "scroll" }, el("table", { class: "plain" }, el("thead", {}, el("tr", {}, ["Chunks up to", "Live and free", "Live", "Allocations", "Free", "Free chunks"].map((name, index) => el("th", { scope: "col", class: index > 1 ? "number" : "" }, name)))),
    el("tbody", {}, all.map((size) => el("tr", {}, el("td", {}, bytes(size.chunk_bytes_max)), el("td", {}, el("div", { class: "ladder inline" }, [["live", size.live_bytes], ["pinned", size.free_bytes]].map(([name, value]) => el("span", { class: `part ${name}`, title: `${name === "live" ? "live" : "free"}: ${exact(value)}`, style: { width: `${((value / most) * 100).toFixed(3)}%` } })))),
      el("td", { class: "number" }, amount(size.live_bytes)), el("td", { class: "number" }, count(size.live_allocations)), el("td", { class: "number" }, amount(size.free_bytes)), el("td", { class: "number" }, count(size.free_chunks))))))) : el("p", { class: "quiet" }, "Not known at this level of census."));
  put(part.from, source("census", visible(heap.level)));
}

function drawQuality(part, one, heap) {
  const walk = heap?.walk;
  put(part.body,
    el("div", { class: "scroll" }, el("table", { class: "plain" }, el("thead", {}, el("tr", {}, ["Census", "Age", "Took", "Processor time", "Not understood or read", "Basis for verdicts"].map((name, index) => el("th", { scope: "col", class: index && index < 5 ? "number" : "" }, name)))),
      el("tbody", {}, (one.censuses ?? []).map((census) => el("tr", {}, el("td", {}, visible(census.level)), [duration(census.age_s), duration((census.duration_ms ?? census.walk?.duration_ms) / 1000), duration(census.cpu_ms / 1000), amount(census.unknown_bytes ?? census.walk?.unknown_bytes)].map((value) => el("td", { class: "number" }, value)),
        el("td", {}, (census.usable ?? census.walk?.usable) ? "yes" : el("b", {}, "no"))))))),
    walk ? pairs([["Windows read", count(walk.windows)], ["Broken headers", count(walk.broken_headers)], walk.broken_lists ? ["Broken lists", count(walk.broken_lists)] : null, ["Unread", amount(walk.unread_bytes)]]) : null,
    (heap?.layout_unknown ?? []).map((text) => el("p", { class: "notice" }, `Not understood: ${visible(text)}`)),
    (one.profiles ?? []).length ? [el("h3", {}, "Profiles at hand"), el("ul", { class: "doubts" }, one.profiles.map((profile) => el("li", {}, source(TIERS[profile.mode] ?? visible(profile.mode)), `over ${duration(profile.duration_s)}, finished ${clock(profile.at_unix_s)}`, profile.slowdown_ratio_est != null ? `, slows the process by about ${percent(profile.slowdown_ratio_est, 2)}` : "")))] : null);
  put(part.from, source("census"));
}
