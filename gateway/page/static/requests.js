// The list of requests: state, progress, where each one runs. One can be selected.

import { byId, count, make, setText } from "./format.js";

const STATES = ["waiting", "running", "draining"];
const SHAPES = {
  waiting: '<circle cx="7" cy="7" r="5"/><path d="M7 4v3l2 2"/>',
  running: '<path d="M3 1.5v11l9.5-5.5z"/>',
  draining: '<path d="M7 1v8M3 6l4 4 4-4M2 13h10"/>',
};

class Row {
  constructor(id, pick) {
    this.id = id;
    this.glyph = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.glyph.setAttribute("class", "glyph");
    this.glyph.setAttribute("viewBox", "0 0 14 14");
    this.glyph.setAttribute("aria-hidden", "true");
    this.where = make("span", { class: "where" });
    this.parts = ["hit", "in", "out"].map((name) => make("span", { class: name }));
    this.counts = make("span", { class: "counts" });
    this.element = make(
      "li",
      { role: "option", id: `request-${id}`, "aria-selected": "false", "data-request": id },
      this.glyph,
      make("span", { class: "name", text: id, title: id }),
      this.where,
      make("div", { class: "bar", "aria-hidden": "true" }, ...this.parts),
      this.counts,
    );
    this.element.addEventListener("click", () => pick(id));
  }

  update(request, selected, own) {
    const state = STATES[request.state];
    if (state !== this.state) {
      this.state = state;
      this.glyph.innerHTML = SHAPES[state];
    }
    this.element.className = `${state}${own ? " own" : ""}`;
    this.element.setAttribute("aria-selected", String(selected));
    setText(this.where, state === "running" ? `replica ${request.replica}` : state);
    const hit = Math.max(0, request.cached);
    const computed = Math.max(0, Math.min(request.computed, request.prompt) - hit);
    [hit, computed, request.output].forEach((tokens, place) => {
      this.parts[place].style.width = `${(100 * tokens) / request.limit}%`;
    });
    setText(
      this.counts,
      `${count(request.prompt)} prompt${request.cached >= 0 ? ` (${count(hit)} cached)` : ""} · ${count(request.output)} of ${count(request.limit - request.prompt)} generated` +
        (request.priority ? ` · priority ${request.priority}` : ""),
    );
  }
}

export class Requests {
  /** pick(id or null): the selection changed by hand. */
  constructor(world, pick) {
    this.world = world;
    this.pick = pick;
    this.rows = new Map();
    this.selected = null;
    this.own = "";
    this.list = byId("requests-list");
    this.list.addEventListener("keydown", (event) => this.#key(event));
    byId("base-url").textContent = `${location.origin}/v1`;
  }

  isOwn(id) {
    return this.own !== "" && id.startsWith(this.own);
  }

  select(id) {
    this.selected = id;
    this.update();
  }

  update() {
    const requests = [...this.world.requests].sort((a, b) => this.isOwn(b.id) - this.isOwn(a.id));
    byId("requests-empty").hidden = requests.length > 0;
    byId("requests-box").hidden = requests.length === 0;
    const hidden = this.world.unfinished - requests.length;
    setText(byId("requests-count"), requests.length ? `${count(this.world.unfinished)} unfinished${hidden > 0 ? `, the first ${count(requests.length)} shown` : ""}` : "");
    const seen = new Set();
    requests.forEach((request, place) => {
      let row = this.rows.get(request.id);
      if (!row) this.rows.set(request.id, (row = new Row(request.id, (id) => this.pick(id === this.selected ? null : id))));
      row.update(request, request.id === this.selected, this.isOwn(request.id));
      seen.add(request.id);
      if (this.list.children[place] !== row.element) this.list.insertBefore(row.element, this.list.children[place] ?? null);
    });
    for (const [id, row] of this.rows) {
      if (seen.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    const active = this.rows.get(this.selected)?.element.id;
    if (active) this.list.setAttribute("aria-activedescendant", active);
    else this.list.removeAttribute("aria-activedescendant");
  }

  #key(event) {
    const ids = [...this.list.children].map((row) => row.dataset.request);
    if (!ids.length) return;
    const at = ids.indexOf(this.selected);
    const to = { ArrowDown: at + 1, ArrowUp: at < 0 ? ids.length - 1 : at - 1, Home: 0, End: ids.length - 1 }[event.key];
    if (event.key === "Escape") this.pick(null);
    else if (to === undefined) return;
    else {
      const id = ids[Math.max(0, Math.min(ids.length - 1, to))];
      this.pick(id);
      this.rows.get(id)?.element.scrollIntoView({ block: "nearest" });
    }
    event.preventDefault();
  }
}
