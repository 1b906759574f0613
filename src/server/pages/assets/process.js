// One process: the verdict in words, the ladder now and over time, the address space, arenas, size classes, stacks.

import * as api from "./api.js";
import { el, put, visible } from "./dom.js";
import { drawVerdict, drawWhere } from "./facts.js";
import * as map from "./map.js";
import { ROWS_MAX, TIERS, eventList, liveAndFree, pairs, section, sorry, source, table } from "./parts.js";
import { callStacks, stackCell } from "./stacks.js";
import { overTime } from "./time.js";
import { address, amount, bytes, clock, count, duration, percent } from "./units.js";

export function open({ main, trail, signal, settings, argument: pid }) {
  const head = el("section", { class: "card verdict", id: "verdict", "aria-label": "Verdict" }, el("p", { class: "quiet" }, "Loading…"));
  const where = section("where", "Where the memory is", "the process's resident memory, and its heaps");
  const time = section("time", "Over time");
  const space = section("space", "Address space", "each cell is a page or several, in the order of addresses");
  const stacks = section("stacks", "Call stacks", "of the memory it holds");
  const arenas = section("arenas", "Arenas");
  const sizes = section("sizes", "Size classes", "chunks by size, with the allocator's rounding");
  const quality = section("quality", "Evidence", "what was examined, what was lost, what is in doubt");
  const all = [
    ["verdict", "Verdict"],
    ["where", "Memory"],
    ["time", "Over time"],
    ["space", "Address space"],
    ["stacks", "Stacks"],
    ["arenas", "Arenas"],
    ["sizes", "Sizes"],
    ["quality", "Evidence"],
  ];
  put(
    main,
    head,
    el(
      "nav",
      { class: "jump", "aria-label": "Parts of this page" },
      all.map(([id, name]) =>
        el(
          "a",
          {
            href: `#${id}`,
            onclick: (event) => {
              event.preventDefault();
              document.getElementById(id)?.scrollIntoView({ block: "start" });
            },
          },
          name,
        ),
      ),
    ),
    where.node,
    time.node,
    space.node,
    stacks.node,
    arenas.node,
    sizes.node,
    quality.node,
  );

  let closest = "";
  let loaded = false;

  const keep = () => history.replaceState(null, "", settings.size ? `#/p/${pid}?${settings}` : `#/p/${pid}`);
  const set = (name, value) => {
    if (value === null || value === undefined) settings.delete(name);
    else settings.set(name, value);
    keep();
  };

  const timeView = overTime(time, { pid, signal, settings, set });
  let stackView = null;
  let picture = null;
  // Whether there is an exact recording: only it knows the stack of the block at an address.
  let recorded = false;

  async function closer(one) {
    // The contents of the heap change only with a full or sampled census: no need to request them each time.
    // A recording has blocks where the earlier map had none.
    const closely = (one.censuses ?? []).filter((census) => census.level !== "top");
    const exactly = (one.profiles ?? []).filter((profile) => profile.mode === "exact");
    const key = [...closely, ...exactly].map((each) => each.at_unix_s).join();
    if (key === closest && loaded) return;
    closest = key;
    loaded = true;
    const range =
      settings.get("from") && settings.get("to") ? { from: Number(settings.get("from")), to: Number(settings.get("to")) } : null;
    look(range);
    await Promise.allSettled([
      api.heap(pid, signal).then(
        (heap) => {
          drawArenas(arenas, heap);
          drawSizes(sizes, heap);
          drawQuality(quality, one, heap);
        },
        (error) => {
          for (const part of [arenas, sizes]) sorry(part.body, error);
          drawQuality(quality, one, null);
        },
      ),
      api.explain(pid, signal).then(
        (said) => drawVerdict(head, one, said),
        () => drawVerdict(head, one, null),
      ),
    ]);
  }

  // The map is not awaited: the agent walks the whole heap for it, within its budget.
  function look(range) {
    picture ??= map.picture(space.body, {
      signal,
      range,
      load: async (values) => {
        const got = await api.map(pid, values, signal);
        put(space.from, source("census", `taken ${clock(got.at_unix_s)}`));
        return mapOf(got);
      },
      stacks: async (from, to) => (recorded ? owners(await api.stacks(pid, { from, to, top: OWNERS_MAX }, signal)) : null),
      onrange: (to) => {
        set("from", to ? address(to.from) : null);
        set("to", to ? address(to.to) : null);
      },
    });
    picture.refresh().catch((error) => {
      if (error.name === "AbortError") return;
      picture = null;
      sorry(space.body, error);
      space.body.append(el("button", { type: "button", onclick: () => look(range) }, "Try again"));
    });
  }

  return {
    async refresh() {
      const drawn = timeView.refresh();
      // Failures are handled below, unless the process has ended.
      drawn.catch(() => {});
      const [one, agent] = await Promise.all([api.process(pid, signal), stackView ? null : api.agent(signal).catch(() => null)]);
      stackView ??= callStacks(stacks, {
        settings,
        set,
        ask: (values) => api.profile(pid, values, signal),
        seconds_max: agent?.profile_seconds_max,
        absent: `A census knows every block, but not its call stack. fragprof record -p ${pid} records stacks, at about 2 µs per allocation.`,
      });
      document.title = `${visible(one.comm)} (${pid}) – fragprof`;
      put(trail, el("span", {}, visible(one.comm)), el("span", { class: "quiet" }, `pid ${pid}`));
      recorded = (one.profiles ?? []).some((profile) => profile.mode === "exact");
      if (!loaded) drawVerdict(head, one, null);
      drawWhere(where, one);
      await Promise.all([closer(one), drawn, stackView.refresh(one.profiles ?? [])]);
      const ages = (one.censuses ?? []).map((census) => census.age_s);
      return ages.length ? `last census ${duration(Math.min(...ages))} ago` : "no census yet";
    },
    failed(error) {
      if (!(error instanceof api.Refused && error.status === 404)) return;
      put(
        head,
        el("h1", {}, `Process ${pid}`),
        el("p", { class: "notice" }, error.message),
        el("p", {}, el("a", { href: "#/" }, "All processes")),
      );
      for (const part of [where, space, stacks, arenas, sizes, quality]) part.node.hidden = true;
      // A process that has ended may still be in the history.
      timeView.refresh().catch(() => {});
      api.events({ pid }, signal).then(
        (got) => put(head.appendChild(el("div")), eventList(got.events)),
        () => {},
      );
    },
    settings() {},
  };
}

// Stacks shown of a range of addresses.
const OWNERS_MAX = 5;

// The stacks of the blocks in a range.
function owners(got) {
  if (!got.live_allocations) return el("p", { class: "quiet" }, `The recording of ${clock(got.at_unix_s)} has no blocks here.`);
  return [
    el(
      "p",
      { class: "quiet" },
      source(
        "exact",
        `${count(got.live_allocations)} blocks, ${bytes(got.live_bytes)}, of those allocated in the ${duration(got.duration_s)} until ${clock(got.at_unix_s)}`,
      ),
    ),
    el(
      "table",
      { class: "plain stacktable" },
      el(
        "tbody",
        {},
        got.stacks.map((stack) =>
          el(
            "tr",
            {},
            el("td", { class: "number" }, amount(stack.live_bytes)),
            el("td", { class: "number quiet" }, count(stack.live_allocations)),
            el("td", {}, stackCell(stack.frames, stack.title)),
          ),
        ),
      ),
    ),
    got.stacks_left_out ? el("p", { class: "quiet" }, `and ${count(got.stacks_left_out)} stacks more`) : null,
  ];
}

// The answer of `/map` for drawing: cells by name, addresses as numbers.
function mapOf(got) {
  const named = (cell) => Object.fromEntries(got.columns.map((column, index) => [column, cell[index]]));
  const pieces = got.pieces.map((piece) => ({
    ...piece,
    start: Number(piece.start),
    end: Number(piece.end),
    allocator: visible(piece.allocator),
    cells: piece.cells.map(named),
  }));
  return { ...got, pieces };
}

function drawArenas(part, heap) {
  const all = heap.heaps.flatMap((one) => one.arenas.map((arena, index) => ({ ...arena, name: `${visible(one.allocator)} ${index}` })));
  all.sort((a, b) => b.extent_bytes - a.extent_bytes);
  const most = Math.max(1, ...all.map((arena) => arena.extent_bytes));
  const row = (arena) =>
    el(
      "tr",
      {},
      el("td", {}, arena.name, " ", el("span", { class: "mono quiet" }, address(arena.address))),
      el("td", {}, liveAndFree(arena.live_bytes ?? 0, (arena.free_bytes ?? 0) + (arena.cached_bytes ?? 0) + (arena.top_bytes ?? 0), most)),
      [
        arena.extent_bytes,
        arena.resident_bytes,
        // A census that did not walk the chunks does not have these.
        arena.live_bytes,
        arena.free_bytes,
        arena.cached_bytes,
        arena.top_bytes,
      ].map((value) => el("td", { class: "number" }, amount(value))),
      el("td", { class: "number" }, count(arena.attached_threads)),
      el("td", { class: "number" }, count(arena.pieces)),
    );
  const heads = ["Arena", "Live and free", "Extent", "Resident", "Live", "Free", "Cached", "End", "Threads", "Pieces"];
  put(
    part.body,
    all.length
      ? table(heads, all.slice(0, ROWS_MAX).map(row))
      : el("p", { class: "quiet" }, "No arenas are known of this allocator."),
    all.length > ROWS_MAX ? el("p", { class: "quiet" }, `and ${count(all.length - ROWS_MAX)} smaller arenas`) : null,
  );
  put(part.from, source("census", visible(heap.level)));
}

function drawSizes(part, heap) {
  const all = heap.heaps.flatMap((one) => one.size_classes.map((size) => ({ ...size, allocator: visible(one.allocator) })));
  const most = Math.max(1, ...all.map((size) => size.live_bytes + size.free_bytes));
  const row = (size) =>
    el(
      "tr",
      {},
      el("td", {}, bytes(size.chunk_bytes_max)),
      el("td", {}, liveAndFree(size.live_bytes, size.free_bytes, most)),
      el("td", { class: "number" }, amount(size.live_bytes)),
      el("td", { class: "number" }, count(size.live_allocations)),
      el("td", { class: "number" }, amount(size.free_bytes)),
      el("td", { class: "number" }, count(size.free_chunks)),
    );
  const heads = ["Chunks up to", "Live and free", "Live", "Allocations", "Free", "Free chunks"];
  put(part.body, all.length ? table(heads, all.map(row)) : el("p", { class: "quiet" }, "Not known at this level of census."));
  put(part.from, source("census", visible(heap.level)));
}

function drawQuality(part, one, heap) {
  const walk = heap?.walk;
  const row = (census) =>
    el(
      "tr",
      {},
      el("td", {}, visible(census.level)),
      [
        duration(census.age_s),
        duration((census.duration_ms ?? census.walk?.duration_ms) / 1000),
        duration(census.cpu_ms / 1000),
        amount(census.unknown_bytes ?? census.walk?.unknown_bytes),
      ].map((value) => el("td", { class: "number" }, value)),
      el("td", {}, (census.usable ?? census.walk?.usable) ? "yes" : el("b", {}, "no")),
    );
  const heads = ["Census", "Age", "Took", "CPU time", "Not understood or read", "Usable for verdicts"];
  put(
    part.body,
    table(heads, (one.censuses ?? []).map(row), { isNumber: (column) => column > 0 && column < 5 }),
    walk
      ? pairs([
          ["Windows read", count(walk.windows)],
          ["Broken headers", count(walk.broken_headers)],
          walk.broken_lists ? ["Broken lists", count(walk.broken_lists)] : null,
          ["Unread", amount(walk.unread_bytes)],
        ])
      : null,
    (heap?.layout_unknown ?? []).map((text) => el("p", { class: "notice" }, `Not understood: ${visible(text)}`)),
    (one.profiles ?? []).length
      ? [
          el("h3", {}, "Profiles"),
          el(
            "ul",
            { class: "doubts" },
            one.profiles.map((profile) =>
              el(
                "li",
                {},
                source(TIERS[profile.mode] ?? visible(profile.mode)),
                `over ${duration(profile.duration_s)}, finished ${clock(profile.at_unix_s)}`,
                profile.source ? `, ${visible(profile.source)}` : "",
                profile.slowdown_ratio_est != null ? `, slows the process by about ${percent(profile.slowdown_ratio_est, 2)}` : "",
                profile.retention_flags ? `, ${profile.retention_flags} of its stacks flagged as keeping what they allocate` : "",
              ),
            ),
          ),
        ]
      : null,
  );
  put(part.from, source("census"));
}
