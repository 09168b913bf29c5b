// Numbers and times as people read them, and a short way to make elements.

const whole = new Intl.NumberFormat("en");

export const count = (n) => whole.format(n);
/** For tight places: 17,530 → 17.5k. */
export const brief = (n) => (n < 10_000 ? count(n) : `${(n / 1000).toFixed(n < 100_000 ? 1 : 0)}k`);

export const percent = (part, all) => (all > 0 ? `${((100 * part) / all).toFixed(part && part < all / 10 ? 1 : 0)} %` : "–");

export function bytes(n) {
  return n < 10_000 ? `${count(n)} B` : `${(n / 1000).toFixed(1)} kB`;
}

export function microseconds(us) {
  if (us < 1000) return `${us} µs`;
  return us < 1_000_000 ? `${(us / 1000).toFixed(us < 10_000 ? 1 : 0)} ms` : `${(us / 1e6).toFixed(1)} s`;
}

export function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const clock = (date = new Date()) => date.toLocaleTimeString("en-GB");

/** An element with properties (class, text, any attribute) and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Set a text only if it differs: an unchanged node is not laid out or spoken again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const byId = (id) => document.getElementById(id);
