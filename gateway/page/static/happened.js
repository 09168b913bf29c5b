// A short diary of what changed between two snapshots: deaths, recoveries, preemptions.

import { byId, clock, duration, make } from "./format.js";

const KEPT = 30;

const unfinished = (n) => (n === 1 ? "1 unfinished request goes on" : `${n} unfinished requests go on`);

export class Happened {
  constructor(world) {
    this.world = world;
    this.before = null;
    this.diedAt = new Map();
  }

  update() {
    const now = this.world.replicas.map(({ info }) => ({ ...info }));
    const before = this.before;
    this.before = now;
    if (!before || before.length !== now.length || now.some((info, i) => info.steps < before[i].steps)) return;
    now.forEach((info, i) => {
      const worker = this.world.workerOf(i)?.worker_id ?? `the worker of replica ${i}`;
      if (info.epoch > before[i].epoch) {
        this.diedAt.set(i, performance.now());
        const rest = this.world.unfinished ? `; ${unfinished(this.world.unfinished)} from ${this.world.unfinished === 1 ? "its" : "their"} committed tokens` : "";
        this.say(`${worker} is gone${rest}`, "bad");
      }
      if (info.state === "ready" && (before[i].state !== "ready" || info.epoch > before[i].epoch)) {
        const died = this.diedAt.get(i);
        this.say(`${worker} serves replica ${i}, epoch ${info.epoch}${died ? `, ${duration((performance.now() - died) / 1000)} after` : ""}`, "good");
      }
      const preempted = info.preemptions - before[i].preemptions;
      if (preempted > 0) this.say(`replica ${i} ran out of blocks: ${preempted} preempted`, "");
      const fenced = info.fenced_messages - before[i].fenced_messages;
      if (fenced > 0) this.say(`replica ${i}: ${fenced} messages of an earlier life were dropped`, "");
    });
  }

  say(text, kind) {
    const list = byId("happened-list");
    if (!this.spoken) list.replaceChildren();
    this.spoken = true;
    list.prepend(make("li", { class: kind }, make("time", { text: clock() }), text));
    while (list.children.length > KEPT) list.lastChild.remove();
  }
}
