// The ladder: extent ≥ resident ≥ live, and the free part by kind, as a bar and as a legend.

import { el } from "./dom.js";
import { amount, bytes, exact, interval, percent } from "./units.js";
import { STEPS } from "./words.js";

export const ORDER = ["live", "pinned", "trimmable", "kept", "rest", "unseen", "absent"];

const sum = (heaps, key) => heaps.reduce((total, heap) => total + (heap[key] ?? 0), 0);
const known = (heaps, key) =>
  heaps.length && heaps.every((heap) => heap[key] !== null && heap[key] !== undefined) ? sum(heaps, key) : null;

// The sum of the heaps of one or several processes. A step that is unknown for one of them is unknown.
export function total(heaps) {
  const live_est =
    heaps.length && heaps.every((heap) => (heap.live_bytes ?? heap.live_bytes_est) != null)
      ? heaps.reduce((all, heap) => all + (heap.live_bytes ?? heap.live_bytes_est), 0)
      : null;
  const live = known(heaps, "live_bytes");
  const resident = sum(heaps, "resident_bytes");
  return {
    extent_bytes: sum(heaps, "extent_bytes"),
    resident_bytes: resident,
    swapped_bytes: sum(heaps, "swapped_bytes"),
    huge_bytes: sum(heaps, "huge_bytes"),
    live_bytes: live,
    live_bytes_est: live === null ? live_est : null,
    live_bytes_stderr: live === null ? Math.hypot(...heaps.map((heap) => heap.live_bytes_stderr ?? 0)) : null,
    pinned_bytes: known(heaps, "pinned_bytes"),
    trimmable_bytes: known(heaps, "trimmable_bytes"),
    kept_bytes: known(heaps, "kept_bytes"),
    unknown_bytes: known(heaps, "unknown_bytes"),
    cached_bytes: known(heaps, "cached_bytes"),
  };
}

// A ladder as the agent sends it, completed with the steps that it omits.
export const stepsOf = (ladder) => ({
  live_bytes: null,
  live_bytes_est: null,
  pinned_bytes: null,
  trimmable_bytes: null,
  kept_bytes: null,
  ...ladder,
});

// The extent divided into the parts of the bar, which add up to it.
export function parts(steps) {
  // Of several processes, divided already.
  if (steps.cut) return steps.cut;
  const { extent_bytes: extent, resident_bytes: resident } = steps;
  const all = { live: 0, pinned: 0, trimmable: 0, kept: 0, rest: 0, unseen: 0, absent: Math.max(0, extent - resident) };
  const live = steps.live_bytes ?? steps.live_bytes_est;
  if (live === null || live === undefined) return { ...all, unseen: resident };
  let left = resident;
  const take = (name, value) => {
    all[name] = Math.min(value ?? 0, left);
    left -= all[name];
  };
  take("pinned", steps.pinned_bytes);
  take("trimmable", steps.trimmable_bytes);
  take("kept", steps.kept_bytes);
  take("live", live);
  all[steps.pinned_bytes === null ? "unseen" : "rest"] = left;
  return all;
}

export function sentence(steps) {
  const cut = parts(steps);
  const named = ORDER.filter((name) => cut[name] > 0).map((name) => `${STEPS[name].name.toLowerCase()} ${bytes(cut[name])}`);
  return named.length ? named.join(", ") : "nothing";
}

// A bar. `scale` is the bytes of its full width; by default the extent.
export function bar(node, steps, scale = steps.extent_bytes, withLabels = false) {
  const cut = parts(steps);
  node.classList.add("ladder");
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", `Extent ${bytes(steps.extent_bytes)}: ${sentence(steps)}`);
  const shown = ORDER.filter((name) => cut[name] > 0 && scale > 0);
  while (node.children.length > shown.length) node.lastChild.remove();
  shown.forEach((name, index) => {
    let part = node.children[index];
    if (!part) node.append((part = el("span")));
    part.className = `part ${name}`;
    const share = cut[name] / scale;
    part.style.setProperty("width", `${(share * 100).toFixed(4)}%`);
    part.title = `${STEPS[name].name}: ${exact(cut[name])} (${percent(cut[name] / steps.extent_bytes, 1)} of the extent), ${STEPS[name].text}`;
    part.replaceChildren(...(withLabels && share > 0.075 ? [el("span", { class: "tag" }, bytes(cut[name]))] : []));
  });
  return node;
}

export function legend(steps, names = ORDER) {
  const cut = parts(steps);
  return el(
    "dl",
    { class: "legend" },
    names
      .filter((name) => cut[name] > 0 || ["live", "pinned", "trimmable"].includes(name))
      .map((name) =>
        el(
          "div",
          { title: STEPS[name].text },
          el("dt", {}, el("span", { class: `swatch ${name}`, "aria-hidden": "true" }), STEPS[name].name),
          el(
            "dd",
            {},
            name === "live" && steps.live_bytes_est
              ? ["≈ ", amount(steps.live_bytes_est), ` ${interval(steps.live_bytes_stderr)}`]
              : unknown(steps, name)
                ? amount(null)
                : amount(cut[name]),
          ),
        ),
      ),
  );
}

function unknown(steps, name) {
  const key = `${name}_bytes`;
  return key in steps && steps[key] === null;
}
