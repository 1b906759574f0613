// The frame around the views: the view named in the URL, refreshing, light and dark theme.

import { el, put } from "./dom.js";
import { Refused } from "./api.js";
import * as list from "./list.js";

// Time between two refreshes, in milliseconds: the cheap census comes every 15 s, resident bytes every 5 s.
const REFRESH_MS = 5000;

const main = document.getElementById("main");
const trail = document.getElementById("trail");
const status = document.getElementById("status");
const pause = document.getElementById("pause");
const themeButton = document.getElementById("theme");
const dark = document.getElementById("dark");

let view = null;
let leave = new AbortController();
let paused = false;
let timer = 0;

// The list is loaded with the page; the other views when first needed.
const VIEWS = [
  { path: /^\/?$/, view: () => list },
  { path: /^\/p\/(\d+)$/, view: () => import("./process.js") },
  { path: /^\/e\/(\d+)$/, view: () => import("./event.js") },
];

// `#/p/4242?by=pinned_bytes`: the path names the view, the rest its settings, so that a link shows what its sender saw.
export function place() {
  const [path, query] = (location.hash.slice(1) || "/").split("?");
  return { path, settings: new URLSearchParams(query ?? "") };
}

async function route() {
  const { path, settings } = place();
  if (view && view.path === path) {
    view.settings?.(settings);
    return;
  }
  leave.abort();
  leave = new AbortController();
  clearTimeout(timer);
  const signal = leave.signal;
  const found = VIEWS.map((one) => ({ one, match: one.path.exec(path) })).find(({ match }) => match);
  put(trail);
  if (!found) {
    put(main, el("p", { class: "notice" }, "There is no such page. ", el("a", { href: "#/" }, "All processes")));
    view = null;
    return;
  }
  view = null;
  const { open } = await found.one.view();
  if (signal.aborted) return;
  view = { path, ...open({ main, trail, signal, settings, argument: found.match[1] }) };
  await refresh();
}

async function refresh() {
  clearTimeout(timer);
  const now = view;
  if (!now) return;
  try {
    const said = await now.refresh();
    if (now !== view) return;
    say(said ?? "", false);
    performance.mark("content");
    document.documentElement.dataset.content = "shown";
  } catch (error) {
    if (now !== view || error.name === "AbortError") return;
    say(error instanceof Refused ? error.message : `This page failed: ${error.message}`, true);
    if (!(error instanceof Refused)) console.error(error);
    now.failed?.(error);
    document.documentElement.dataset.content = "failed";
  }
  if (!paused && !document.hidden) timer = setTimeout(refresh, REFRESH_MS);
}

function say(text, bad) {
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("bad", bad);
}

pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", paused);
  pause.textContent = paused ? "Resume" : "Pause";
  clearTimeout(timer);
  if (!paused) refresh();
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !paused) refresh();
});

const THEMES = ["system", "light", "dark"];
const remembered = () => {
  try {
    return localStorage.getItem("theme") ?? "system";
  } catch {
    return "system";
  }
};

function setTheme(theme) {
  dark.media = { light: "not all", dark: "all" }[theme] ?? "(prefers-color-scheme: dark)";
  themeButton.textContent = { system: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[theme] ?? "Theme: auto";
  document.dispatchEvent(new Event("theme"));
}

themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(remembered()) + 1) % THEMES.length];
  try {
    localStorage.setItem("theme", next);
  } catch {
    // Without storage the choice lasts for this page.
  }
  setTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("theme")));

setTheme(remembered());
addEventListener("hashchange", route);
route();
