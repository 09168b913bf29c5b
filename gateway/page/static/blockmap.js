// The block map of one replica: every block a cell. Only cells that changed are painted again, as pixels into one image,
// so 100,000 of them stay smooth; what is pointed out lies on a second canvas above.

import { colour, makeTiles } from "./tiles.js";

const SIDES = [20, 18, 16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2];
const TALLEST = 300;
const DASHES = [[], [7, 4], [2, 4]];

export class BlockMap {
  /** on.point(block or null, {x, y}, how), on.pick(block) */
  constructor(replica, states, on) {
    this.replica = replica;
    this.states = states;
    this.on = on;
    this.cursor = null;
    this.paths = []; // per cache group the ids of the selected request's blocks, in logical order
    this.element = document.createElement("div");
    this.element.className = "map";
    this.canvas = this.#layer("cells");
    this.over = this.#layer("over");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "block map");
    this.canvas.addEventListener("pointermove", (event) => this.#hover(event));
    this.canvas.addEventListener("pointerleave", () => this.on.point(null));
    this.canvas.addEventListener("click", (event) => this.#click(event));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("blur", () => this.#move(null));
    this.watcher = new ResizeObserver(() => this.layout());
    this.watcher.observe(this.element);
  }

  #layer(name) {
    const canvas = document.createElement("canvas");
    canvas.className = name;
    this.element.append(canvas);
    return canvas;
  }

  remove() {
    this.watcher.disconnect();
    this.element.remove();
  }

  /** Size of the cells from the width there is; then all of them anew. */
  layout() {
    const n = this.replica.cells.length;
    const width = this.element.clientWidth;
    if (!n || !width) return;
    const scale = Math.min(3, window.devicePixelRatio || 1);
    const side = SIDES.find((s) => Math.ceil(n / Math.floor(width / s)) * s <= TALLEST) ?? SIDES.at(-1);
    this.columns = Math.min(n, Math.floor(width / side));
    const room = n > this.columns ? width / this.columns : side; // full rows reach from edge to edge
    this.pixels = Math.max(1, Math.floor(room * scale)); // of a cell
    this.side = this.pixels / scale; // the same in CSS pixels
    this.rows = Math.ceil(n / this.columns);
    const gap = side >= 5 ? Math.max(1, Math.round(scale)) : side >= 4 ? 1 : 0;
    this.gap = gap / scale;
    for (const canvas of [this.canvas, this.over]) {
      canvas.width = this.columns * this.pixels;
      canvas.height = this.rows * this.pixels;
      canvas.style.width = `${canvas.width / scale}px`;
      canvas.style.height = `${canvas.height / scale}px`;
    }
    this.scale = scale;
    this.tiles = makeTiles(this.states, this.pixels, gap);
    this.image = new ImageData(this.canvas.width, this.canvas.height);
    this.dots = new Uint32Array(this.image.data.buffer);
    this.replica.resized = false;
    this.replica.changes = [[0, n]];
    this.paint();
    this.paintOver();
  }

  /** Bring what changed onto the canvas. */
  paint() {
    if (this.replica.resized || !this.image) return this.layout();
    const changes = this.replica.changes;
    if (!changes.length) return;
    this.replica.changes = [];
    let top = this.rows;
    let bottom = 0;
    for (const [start, end] of changes) {
      for (let block = start; block < end; block++) this.#paintCell(block);
      top = Math.min(top, Math.floor(start / this.columns));
      bottom = Math.max(bottom, Math.ceil(end / this.columns));
    }
    const p = this.pixels;
    this.canvas.getContext("2d").putImageData(this.image, 0, 0, 0, top * p, this.canvas.width, (bottom - top) * p);
  }

  #paintCell(block) {
    const p = this.pixels;
    const tile = this.tiles[this.replica.cells[block]];
    const across = this.canvas.width;
    let target = Math.floor(block / this.columns) * p * across + (block % this.columns) * p;
    for (let source = 0; source < tile.length; source += p, target += across) {
      for (let x = 0; x < p; x++) this.dots[target + x] = tile[source + x];
    }
  }

  /** The selected request's way through the map, one line per cache group, and the cursor. */
  paintOver() {
    if (!this.image) return;
    const context = this.over.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.over.width, this.over.height);
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    const line = this.side >= 6 ? 2 : 1;
    this.paths.forEach((ids, group) => this.#paintPath(context, ids.filter((id) => id > 0), group, line));
    if (this.cursor !== null) this.#frame(context, this.cursor, colour("ink"), 2);
  }

  #paintPath(context, ids, group, line) {
    if (!ids.length) return;
    const path = new Path2D();
    ids.forEach((id, place) => (place ? path.lineTo(...this.#centre(id)) : path.moveTo(...this.#centre(id))));
    context.lineJoin = context.lineCap = "round";
    for (const [stroke, width, dash] of [
      [colour("path-halo"), line + 2, []],
      [colour("path"), line, DASHES[group % DASHES.length]],
    ]) {
      context.strokeStyle = stroke;
      context.lineWidth = width;
      context.setLineDash(dash);
      context.stroke(path);
    }
    context.setLineDash([]);
    for (const id of ids) this.#frame(context, id, colour("path"), this.side >= 8 ? 2 : 1);
    const radius = Math.max(2.5, Math.min(5, this.side / 3));
    this.#dot(context, ids[0], radius, colour("path"), colour("path-halo"));
    this.#dot(context, ids.at(-1), radius, colour("path-halo"), colour("path"));
  }

  #dot(context, id, radius, fill, stroke) {
    context.beginPath();
    context.arc(...this.#centre(id), radius, 0, 2 * Math.PI);
    context.fillStyle = fill;
    context.strokeStyle = stroke;
    context.lineWidth = 1.5;
    context.fill();
    context.stroke();
  }

  #frame(context, id, stroke, width) {
    const x = (id % this.columns) * this.side;
    const y = Math.floor(id / this.columns) * this.side;
    const inset = width / 2;
    context.strokeStyle = stroke;
    context.lineWidth = width;
    context.strokeRect(x + inset, y + inset, this.side - this.gap - width, this.side - this.gap - width);
  }

  #centre(id) {
    const half = (this.side - this.gap) / 2;
    return [(id % this.columns) * this.side + half, Math.floor(id / this.columns) * this.side + half];
  }

  show(paths) {
    const same = paths.length === this.paths.length && paths.every((ids, i) => ids.join() === this.paths[i].join());
    if (same) return;
    this.paths = paths;
    this.paintOver();
  }

  #blockAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.side);
    const block = Math.floor((event.clientY - box.top) / this.side) * this.columns + column;
    return column >= 0 && column < this.columns && block >= 0 && block < this.replica.cells.length ? block : null;
  }

  #hover(event) {
    if (event.pointerType === "mouse") this.on.point(this.#blockAt(event), { x: event.clientX, y: event.clientY });
  }

  #click(event) {
    const block = this.#blockAt(event);
    if (block !== null) this.on.pick(block);
  }

  #key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const last = this.replica.cells.length - 1;
    if (event.key in steps) this.#move(this.cursor === null ? 0 : Math.max(0, Math.min(last, this.cursor + steps[event.key])));
    else if (event.key === "Home") this.#move(0);
    else if (event.key === "End") this.#move(last);
    else if ((event.key === "Enter" || event.key === " ") && this.cursor !== null) this.on.pick(this.cursor);
    else if (event.key === "Escape") this.#move(null);
    else return;
    event.preventDefault();
  }

  #move(block) {
    if (block === this.cursor) return;
    this.cursor = block;
    this.paintOver();
    if (block === null) return this.on.point(null);
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = this.#centre(block);
    this.on.point(block, { x: box.left + x, y: box.top + y }, "keyboard");
  }
}
