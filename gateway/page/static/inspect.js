// The details of what is selected: one block's books, or one request's block table, asked for while they are shown.

import { get } from "./api.js";
import { byId, count, duration, make, setText } from "./format.js";

const MOST_ENTRIES = 400;
const AGAIN_MS = 250;

export const STATE_WORDS = { null: "null block", free: "free", cached: "free, cached", used: "in use", shared: "shared" };

/** What a block's books say, in lines. */
export function describeBlock(info) {
  const lines = [];
  if (info.state === "null") lines.push("stands for “no block here”: never allocated, never written");
  if (info.ref_cnt) lines.push(`${count(info.ref_cnt)} table ${info.ref_cnt === 1 ? "entry names" : "entries name"} it`);
  if (info.block_hash) lines.push(`hash ${info.block_hash.slice(0, 16)}…`);
  else if (info.ref_cnt) lines.push("no hash yet: not full, or its content is found in another block");
  info.owners.slice(0, 3).forEach((owner, place) => lines.push(`entry ${info.indices[place]} of ${owner}`));
  if (info.ref_cnt > 3) lines.push(`and ${info.ref_cnt - 3} more`);
  if (info.age_s >= 0) lines.push(`like this for ${duration(info.age_s)}`);
  return lines;
}

export const blockTitle = (info) => `Block ${count(info.block_id)}: ${STATE_WORDS[info.state] ?? "gone"}`;

export class Inspect {
  /** on.table(table or null): for the maps. on.select(request id): an owner was chosen. on.close() */
  constructor(world, on) {
    this.world = world;
    this.on = on;
    this.wanted = null; // {request} or {replica, block}
    this.busy = false;
    this.box = byId("inspect");
    byId("inspect-close").addEventListener("click", () => on.close());
  }

  showRequest(id) {
    if (this.wanted?.request !== id) this.#want({ request: id });
  }

  showBlock(replica, block) {
    this.#want({ replica, block });
  }

  hide() {
    this.wanted = null;
    this.box.hidden = true;
    this.on.table(null);
  }

  #want(wanted) {
    this.wanted = wanted;
    this.drawn = "";
    this.on.table(null);
    byId("inspect-body").replaceChildren(make("p", { class: "note", text: "…" }));
    this.box.hidden = false;
    this.asked = 0;
    this.update();
  }

  /** Ask again if the last answer is old. Called with every snapshot. */
  async update() {
    const wanted = this.wanted;
    if (!wanted || this.busy || performance.now() - this.asked < AGAIN_MS) return;
    this.busy = true;
    this.asked = performance.now();
    try {
      const answer = wanted.request !== undefined
        ? await get("/v1/page/table", { request_id: wanted.request })
        : await get("/v1/page/block", { replica: wanted.replica, block_id: wanted.block });
      if (wanted === this.wanted) wanted.request !== undefined ? this.#drawTable(answer) : this.#drawBlock(answer);
    } catch {
      // the line says what is wrong
    } finally {
      this.busy = false;
      if (wanted !== this.wanted) this.update();
    }
  }

  #changed(answer) {
    const text = JSON.stringify(answer);
    if (text === this.drawn) return false;
    this.drawn = text;
    return true;
  }

  #drawBlock(info) {
    if (!this.#changed({ ...info, age_s: Math.round(info.age_s) })) return;
    setText(byId("inspect-title"), `Block ${count(info.block_id)} of replica ${info.replica}`);
    const facts = [["state", STATE_WORDS[info.state] ?? "gone with its worker"], ["references", count(info.ref_cnt)]];
    if (info.group >= 0) facts.push(["cache group", this.#groupName(info.group)]);
    facts.push(["hash", info.block_hash || "none: a prefix lookup cannot find it"]);
    facts.push(["unchanged for", info.age_s < 0 ? "all of this epoch" : duration(info.age_s)]);
    const owners = info.owners.map((owner, place) =>
      make("li", {}, make("button", { type: "button", class: "link mono", text: owner, onclick: () => this.on.select(owner) }), ` entry ${info.indices[place]}`),
    );
    byId("inspect-body").replaceChildren(
      make("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })])),
      ...(owners.length ? [make("h3", { text: "owners" }), make("ul", {}, ...owners)] : []),
    );
  }

  #groupName(group) {
    const window = this.world.hello.groups[group]?.sliding_window;
    return window ? `${group} (sliding window of ${window})` : `${group} (full attention)`;
  }

  #drawTable(table) {
    const request = this.world.requests.find((one) => one.id === table.request_id);
    this.on.table(table.tables.length ? table : null);
    if (!this.#changed({ ...table, over: !request, waits: request?.state })) return;
    setText(byId("inspect-title"), "Block table");
    const body = byId("inspect-body");
    const name = make("p", { class: "mono", text: table.request_id });
    if (!table.tables.length) {
      const text = request ? "It holds no blocks now: it waits to be admitted, or its last token is on its way." : "It has ended; its blocks are free again.";
      body.replaceChildren(name, make("p", { class: "note", text }));
      return;
    }
    const parts = table.tables.flatMap((ids, group) => {
      const shown = ids.slice(0, MOST_ENTRIES).map((id, place) =>
        make(
          "li",
          { class: id === 0 ? "nothing" : place < table.num_hit_blocks ? "hit" : "" },
          make("span", { class: "logical", text: place }),
          make("span", { class: "physical", text: id || "null" }),
        ),
      );
      if (ids.length > MOST_ENTRIES) shown.push(make("li", {}, make("span", { text: `and ${count(ids.length - MOST_ENTRIES)} more` })));
      return [
        make("h3", { text: `${table.tables.length > 1 ? `group ${this.#groupName(group)}: ` : ""}logical → physical, ${count(ids.length)} blocks${table.num_hit_blocks ? `, the first ${table.num_hit_blocks} found in the cache (underlined)` : ""}` }),
        make("ul", { class: "table" }, ...shown),
      ];
    });
    body.replaceChildren(name, make("p", { class: "note", text: `replica ${table.replica}, epoch ${table.epoch}; on the map from ● (first block) to ○ (last)` }), ...parts);
  }
}
