// The line to the gateway: opened, read, and opened again when it breaks or falls silent.

import { call, events, Refused } from "./api.js";

const SILENCE_MS = 6000; // the gateway speaks every second
const LONGEST_WAIT_MS = 8000;

/**
 * Calls on.hello, on.snapshot, on.lost with the events' contents; on.gone(seconds until the next try) when the line
 * breaks; on.key() when a key is asked for. Closed while the tab is hidden: nothing is computed for nobody.
 */
export function openFeed(on) {
  let failures = 0;
  let current = null;
  let timer = 0;

  async function open() {
    const abort = new AbortController();
    current = abort;
    let silence = 0;
    const listen = () => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    try {
      listen();
      const answer = await call("/v1/page/events", { signal: abort.signal });
      for await (const { name, data } of events(answer)) {
        listen();
        failures = 0;
        on[name]?.(JSON.parse(data));
      }
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        current = null;
        on.key();
        return;
      }
      if (error instanceof Refused) on.refused(error.message);
    } finally {
      clearTimeout(silence);
    }
    if (current === abort) again();
  }

  function again() {
    current = null;
    const wait = Math.min(LONGEST_WAIT_MS, 500 * 2 ** failures++);
    on.gone(wait / 1000);
    timer = setTimeout(open, wait);
  }

  function start() {
    clearTimeout(timer);
    const old = current;
    current = null;
    old?.abort();
    open();
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      clearTimeout(timer);
      const old = current;
      current = null;
      old?.abort();
    } else if (!current) {
      start();
    }
  });
  addEventListener("online", start);
  start();
  return { restart: start };
}
