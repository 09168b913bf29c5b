// The small box beside the pointer: a title and lines.

import { byId, make } from "./format.js";

export class Tip {
  constructor() {
    this.box = byId("tip");
  }

  show(at, [title, ...lines]) {
    this.box.replaceChildren(make("strong", { text: title }), ...lines.map((text) => make("span", { text })));
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    const x = at.x + 16 + width > innerWidth ? at.x - width - 12 : at.x + 16;
    const y = at.y + 16 + height > innerHeight ? at.y - height - 12 : at.y + 16;
    this.box.style.transform = `translate(${Math.max(6, x)}px, ${Math.max(6, y)}px)`;
  }

  hide() {
    this.box.hidden = true;
  }
}
