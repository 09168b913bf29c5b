// How a block looks in each state, as pixels. States differ in lightness at every size, and in shape where there is room.

const ROOM_FOR_SHAPES = 7;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Uint32 pixels of one cell per state; size in device pixels, with a gap of `gap` pixels to the right and below. */
export function makeTiles(states, size, gap) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  return states.map((state) => {
    context.clearRect(0, 0, size, size);
    drawCell(context, state, size - gap);
    return new Uint32Array(context.getImageData(0, 0, size, size).data.buffer.slice(0));
  });
}

/** One cell at the origin of a 2D context. */
export function drawCell(context, state, side) {
  const shapes = side >= ROOM_FOR_SHAPES;
  context.save();
  context.beginPath();
  context.rect(0, 0, side, side);
  context.clip();
  context.fillStyle = colour(state);
  if (state === "null" && shapes) {
    context.strokeStyle = colour("null");
    context.lineWidth = Math.max(1, side / 9);
    const inset = side / 5;
    context.beginPath();
    context.moveTo(inset, inset);
    context.lineTo(side - inset, side - inset);
    context.moveTo(side - inset, inset);
    context.lineTo(inset, side - inset);
    context.stroke();
    context.restore();
    return;
  }
  context.fillRect(0, 0, side, side);
  if (state === "cached" && shapes) {
    context.strokeStyle = colour("cached-mark");
    context.lineWidth = Math.max(1, side / 9);
    context.beginPath();
    for (let x = -side; x < side; x += side / 2.5) {
      context.moveTo(x, side);
      context.lineTo(x + side, 0);
    }
    context.stroke();
  }
  if (state === "shared" && shapes) {
    context.fillStyle = colour("shared-mark");
    const dot = Math.max(2, Math.round(side / 3));
    const place = Math.round((side - dot) / 2);
    context.fillRect(place, place, dot, dot);
  }
  context.restore();
}

export { colour };
