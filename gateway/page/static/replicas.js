// A card per replica: who serves it, how full it is, its block map and its steps.

import { BlockMap } from "./blockmap.js";
import { brief, byId, count, make, percent, setText } from "./format.js";
import { StepStrip } from "./steps.js";

const ARMED_MS = 4000;
const LARGE = 24_000; // blocks; a map of more has the width for itself

class Card {
  constructor(replica, world, on) {
    this.replica = replica;
    this.world = world;
    this.on = on;
    this.title = make("h3", {}, `Replica ${replica.index} `, (this.epoch = make("span", { class: "epoch" })));
    this.badge = make("span", { class: "badge" });
    this.kill = make("button", { type: "button", class: "kill", onclick: () => this.#press() });
    this.summary = make("summary");
    this.reason = make("p");
    this.facts = make("details", { class: "worker" }, this.summary, this.reason);
    this.values = {};
    const figures = ["in use", "cached", "waste", "prefix hits"].map((name) =>
      make("div", {}, make("dt", { text: name }), (this.values[name] = make("dd"))),
    );
    this.map = new BlockMap(replica, world.hello.block_states, {
      point: (block, at, how) => on.point(replica, block, at, how),
      pick: (block) => on.pick(replica, block),
    });
    this.gone = make("div", { class: "gone", hidden: true }, (this.goneText = make("p")));
    this.note = make("p", { class: "mapnote note" });
    this.strip = new StepStrip(replica, world, on.tip);
    this.element = make(
      "article",
      { class: "card replica", "data-replica": replica.index, "aria-label": `Replica ${replica.index}` },
      make("header", {}, this.title, this.badge, make("span", { class: "gap" }), this.kill),
      this.facts,
      make("dl", { class: "figures" }, ...figures),
      this.map.element,
      this.gone,
      this.note,
      this.strip.element,
    );
  }

  remove() {
    this.map.remove();
    this.strip.remove();
    this.element.remove();
  }

  update() {
    const { info, cells } = this.replica;
    const ready = info.state === "ready";
    setText(this.epoch, `epoch ${info.epoch}`);
    this.#updateWorker(ready);
    const used = info.total_blocks - info.free_blocks;
    this.#figure("in use", percent(used, info.total_blocks), info.total_blocks ? `${brief(used)} of ${brief(info.total_blocks)}` : "no blocks");
    this.#figure("cached", brief(info.cached_blocks), "blocks findable");
    this.#figure("waste", percent(info.wasted_slots, info.allocated_slots), "in last blocks");
    this.#figure("prefix hits", percent(info.prefix_hits, info.prefix_queries), `${brief(info.prefix_queries)} tokens`);
    this.map.element.hidden = this.note.hidden = !cells.length;
    this.gone.hidden = !!cells.length;
    if (cells.length) {
      this.map.paint();
      setText(this.note, `${count(cells.length)} blocks of ${this.world.hello.block_size} tokens`);
      const label = `Block map of replica ${this.replica.index}: ${count(used)} of ${count(info.total_blocks)} blocks in use. Arrow keys move from block to block.`;
      if (this.map.canvas.getAttribute("aria-label") !== label) this.map.canvas.setAttribute("aria-label", label);
    } else {
      setText(this.goneText, this.world.unfinished
        ? "No worker: its blocks are gone with it. Its requests go on where a replica lives, from the tokens they had."
        : "No worker: its blocks are gone with it. A new one is being started.");
    }
    this.strip.paint();
  }

  #figure(name, value, small) {
    if (this.values[name].textContent !== value + small) this.values[name].replaceChildren(value, make("small", { text: small }));
  }

  #updateWorker(ready) {
    const worker = this.world.workerOf(this.replica.index);
    const state = ready ? "ready" : worker ? "dead, restarting" : "starting";
    setText(this.badge, state);
    this.badge.classList.toggle("dead", !ready);
    this.facts.hidden = !worker;
    if (worker) {
      setText(this.summary, `${worker.worker_id}, pid ${worker.pid} · ${worker.device}, ${worker.dtype} · attention: ${worker.attention_backend}`);
      setText(this.reason, worker.backend_reason || "The worker gave no reason for its choice.");
    }
    const { token, why_not: whyNot } = this.world.hello.kill;
    this.kill.hidden = !ready || !worker;
    this.kill.disabled = !token;
    this.kill.title = whyNot;
    if (this.worker?.incarnation !== worker?.incarnation) this.#disarm();
    this.worker = worker;
    if (!this.armed) setText(this.kill, `kill -9`);
    this.kill.setAttribute("aria-label", worker ? `kill -9 ${worker.worker_id}, pid ${worker.pid}` : "kill");
  }

  #press() {
    if (this.armed) {
      this.#disarm();
      this.on.kill(this.worker);
      return;
    }
    this.armed = setTimeout(() => this.#disarm(), ARMED_MS);
    this.kill.classList.add("armed");
    setText(this.kill, `kill -9 ${this.worker.pid} now`);
  }

  #disarm() {
    clearTimeout(this.armed);
    this.armed = 0;
    this.kill.classList.remove("armed");
    setText(this.kill, "kill -9");
  }
}

export class Replicas {
  /** on: point(replica, block, at, how), pick(replica, block), kill(worker), tip */
  constructor(world, on) {
    this.world = world;
    this.on = on;
    this.cards = [];
    this.box = byId("cards");
  }

  update() {
    byId("skeleton").hidden = true;
    while (this.cards.length > this.world.replicas.length) this.cards.pop().remove();
    for (const replica of this.world.replicas.slice(this.cards.length)) {
      const card = new Card(replica, this.world, this.on);
      this.cards.push(card);
      this.box.append(card.element);
    }
    const most = Math.max(...this.world.replicas.map((replica) => replica.cells.length));
    this.#layOut(most > LARGE);
    for (const card of this.cards) card.update();
  }

  /** Where the maps are tall, the details stand beside them instead of below. */
  #layOut(large) {
    if (this.box.classList.contains("large") === large) return;
    this.box.classList.toggle("large", large);
    const inspect = byId("inspect");
    if (large) document.querySelector(".side").append(inspect);
    else document.querySelector(".happened").before(inspect);
  }

  /** Draw a request's block table into the map of its replica; null: none. */
  show(table) {
    for (const card of this.cards) card.map.show(table && table.replica === card.replica.index ? table.tables : []);
  }

  /** All colours or sizes may have changed. */
  redraw() {
    for (const card of this.cards) {
      card.map.layout();
      card.strip.paint();
    }
  }
}
