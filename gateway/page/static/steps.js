// The strip of a replica's last steps: how long each took, stage by stage, over how many tokens it computed.

import { bytes, count, make, microseconds } from "./format.js";
import { colour } from "./tiles.js";

const STAGES = [
  // name, text, columns; from the bottom of a bar upwards
  ["scheduler", "schedule, encode, result", ["schedule_us", "encode_us", "result_us"]],
  ["wire", "wire", ["wire_us", "return_us"]],
  ["apply", "apply, commit", ["apply_us", "commit_us"]],
  ["forward", "forward", ["forward_us"]],
  ["sample", "sample", ["sample_us"]],
];
const TIME_PART = 0.68; // of the height; the rest is for tokens
const BAR = 4;

export class StepStrip {
  constructor(replica, world, tip) {
    this.replica = replica;
    this.world = world;
    this.tip = tip;
    this.caption = make("p", { class: "note" });
    this.canvas = make("canvas", { role: "img", tabindex: "0" });
    this.element = make("div", { class: "strip" }, this.caption, this.canvas);
    this.watcher = new ResizeObserver(() => this.paint());
    this.watcher.observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.#hover(event));
    this.canvas.addEventListener("pointerleave", () => this.tip.hide());
  }

  remove() {
    this.watcher.disconnect();
  }

  #of(step, name) {
    return step[this.world.stepColumn[name]];
  }

  #stages(step) {
    return STAGES.map(([, , names]) => names.reduce((sum, name) => sum + this.#of(step, name), 0));
  }

  /** What the step took, without the time it waited for the one before it. */
  #total(step) {
    return this.#stages(step).reduce((sum, time) => sum + time, 0);
  }

  paint() {
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    if (!width || !this.world.stepColumn) return;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const steps = this.replica.steps.slice(-Math.floor(width / BAR));
    this.shown = steps;
    this.#describe(steps);
    const base = Math.round(height * TIME_PART);
    context.fillStyle = colour("line");
    context.fillRect(0, base, width, 1);
    context.fillRect(0, height - 1, width, 1);
    if (!steps.length) {
      context.fillStyle = colour("soft");
      context.font = "13px system-ui, sans-serif";
      context.fillText("No step has finished yet.", 2, base - 10);
      return;
    }
    const highest = this.#scale(steps.map((step) => this.#total(step)));
    const widest = Math.max(...steps.map((step) => this.#of(step, "tokens")));
    const left = width - steps.length * BAR;
    const colours = STAGES.map(([name]) => colour(`stage-${name}`));
    const [ink, bad] = [colour("soft"), colour("path")];
    let epoch = this.#of(steps[0], "epoch");
    steps.forEach((step, place) => {
      const x = left + place * BAR;
      let y = base;
      this.#stages(step).forEach((time, stage) => {
        const tall = Math.min(y - 3, (time / highest) * (base - 4));
        if (tall <= 0) return;
        context.fillStyle = colours[stage];
        context.fillRect(x, y - tall, BAR - 1, tall);
        y -= tall;
      });
      if (this.#total(step) > highest) {
        context.fillStyle = ink;
        context.fillRect(x, 0, BAR - 1, 2); // higher than the strip
      }
      const tokens = Math.max(1, (this.#of(step, "tokens") / widest) * (height - base - 5));
      context.fillStyle = ink;
      context.fillRect(x, height - 1 - tokens, BAR - 1, tokens);
      if (this.#of(step, "epoch") !== epoch) {
        epoch = this.#of(step, "epoch");
        context.fillStyle = bad;
        for (let dash = 0; dash < height; dash += 6) context.fillRect(x - 1, dash, 1.5, 4);
      }
    });
  }

  /** The time that fills the strip: few steps are longer, or all would look alike beside one that waited. */
  #scale(times) {
    const sorted = [...times].sort((a, b) => a - b);
    return Math.max(1, sorted[Math.floor(0.95 * (sorted.length - 1))] * 1.15);
  }

  #describe(steps) {
    const last = steps.at(-1);
    const key = last ? `${this.#of(last, "number")}` : "";
    if (key === this.described) return;
    this.described = key;
    if (!last) {
      this.caption.replaceChildren("steps");
      this.canvas.setAttribute("aria-label", "no steps yet");
      return;
    }
    const mean = (name) => Math.round(steps.reduce((sum, step) => sum + this.#of(step, name), 0) / steps.length);
    const time = Math.round(steps.reduce((sum, step) => sum + this.#total(step), 0) / steps.length);
    const texts = [
      make("span", { text: `last ${steps.length} steps: ${microseconds(time)}, ${count(mean("tokens"))} ${mean("tokens") === 1 ? "token" : "tokens"}, plans of ${bytes(mean("plan_bytes"))} on average` }),
      ...STAGES.map(([name, text]) => make("span", { class: `stage ${name}`, text })),
    ];
    this.caption.replaceChildren(...texts);
    this.canvas.setAttribute("aria-label", `Time and tokens of the ${texts[0].textContent}`);
  }

  #hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const steps = this.shown ?? [];
    const place = Math.floor((event.clientX - box.left - (box.width - steps.length * BAR)) / BAR);
    const step = steps[place];
    if (!step) return this.tip.hide();
    const of = (name) => this.#of(step, name);
    this.tip.show({ x: event.clientX, y: event.clientY }, [
      `Step ${count(of("step"))} of epoch ${of("epoch")}: ${microseconds(this.#total(step))}`,
      `${count(of("tokens"))} tokens computed, ${count(of("rows"))} sampled`,
      `schedule ${microseconds(of("schedule_us"))}, encode ${microseconds(of("encode_us"))}: a plan of ${bytes(of("plan_bytes"))}`,
      `wire ${microseconds(of("wire_us"))} there, ${microseconds(of("return_us"))} back`,
      `apply ${microseconds(of("apply_us"))}, commit ${microseconds(of("commit_us"))}`,
      `forward ${microseconds(of("forward_us"))}, sample ${microseconds(of("sample_us"))}`,
      `result ${microseconds(of("result_us"))}; ${microseconds(of("round_us"))} from plan to result, waiting included`,
    ]);
  }
}
