// Formatted numbers. Bytes are IEC with three digits, as everywhere in fragprof; the full number is in the title.

import { el } from "./dom.js";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const grouped = new Intl.NumberFormat("en-US");

export const count = (value) => (value === null || value === undefined ? "–" : grouped.format(Math.round(value)));

export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const sign = value < 0 ? "−" : "";
  let rest = Math.abs(value);
  let unit = 0;
  // 1023.5 and more would be shown as 1024.
  while (rest >= 999.5 && unit < UNITS.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  const digits = unit === 0 ? 0 : rest < 9.995 ? 2 : rest < 99.95 ? 1 : 0;
  return `${sign}${rest.toFixed(digits)} ${UNITS[unit]}`;
}

export const exact = (value) => (value === null || value === undefined ? "not known" : `${grouped.format(value)} bytes`);

// An amount of bytes as an element with the full number in its title.
export function amount(value, more) {
  if (value === null || value === undefined) return el("span", { class: "unknown", title: "not known" }, "–");
  return el("data", { value, title: more ? `${exact(value)}, ${more}` : exact(value) }, bytes(value));
}

// Half the width of a 95 % interval, from its standard error.
export const interval = (stderr) => `±${bytes(1.96 * stderr)}`;

export function signed(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 ? `+${bytes(value)}` : bytes(value);
}

export function percent(share, digits = 0) {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  const value = share * 100;
  if (value > 0 && value < 0.5 && digits === 0) return "<1 %";
  return `${value.toFixed(digits)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.95) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

const time = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const second = new Intl.DateTimeFormat(undefined, {
  month: "short",
  day: "numeric",
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});

export const clock = (unix_s) => time.format(new Date(unix_s * 1000));
export const instant = (unix_s) => second.format(new Date(unix_s * 1000));
export const moment = (unix_s) => day.format(new Date(unix_s * 1000));

// Addresses come as text or as numbers; JavaScript holds 53 bits of a number, which user space on x86-64 (47 bits) fits.
export const address = (value) => `0x${Number(value).toString(16)}`;
