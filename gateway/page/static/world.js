// What the page knows of the server, kept up to date by snapshots. Draws nothing.

const RATE_WINDOW_S = 2;
const KEPT_STEPS = 300;

const unbase64 = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

/** One replica: its counters, the state of each block (Uint8Array) and its last steps (arrays, see stepColumns). */
class Replica {
  constructor(index) {
    this.index = index;
    this.info = null;
    this.cells = new Uint8Array(0);
    this.steps = [];
    this.resized = true;
    this.changes = []; // [start, end] of blocks that changed since they were drawn last
  }

  update(news, whole) {
    const { blocks, new_steps: steps, ...info } = news;
    this.info = info;
    if (blocks.whole && blocks.size !== this.cells.length) {
      this.cells = new Uint8Array(blocks.size);
      this.resized = true;
    }
    if (blocks.raw) {
      this.cells.set(unbase64(blocks.raw));
      this.changes.push([0, blocks.size]);
    } else if (blocks.runs) {
      this.#fill(unbase64(blocks.runs));
    }
    this.steps = whole ? steps : this.steps.concat(steps).slice(-KEPT_STEPS);
  }

  #fill(bytes) {
    const n = bytes.length / 9;
    const starts = new Int32Array(bytes.buffer, 0, n);
    const lengths = new Int32Array(bytes.buffer, 4 * n, n);
    for (let i = 0; i < n; i++) {
      const end = starts[i] + lengths[i];
      this.cells.fill(bytes[8 * n + i], starts[i], end);
      this.changes.push([starts[i], end]);
    }
  }
}

export class World {
  constructor() {
    this.hello = null;
    this.replicas = [];
    this.workers = [];
    this.requests = []; // objects by request column
    this.waiting = 0;
    this.unfinished = 0;
    this.uptime = 0;
    this.rate = 0;
    this.tallies = []; // [uptime, tokens]
  }

  get down() {
    return this.replicas.filter((replica) => replica.info.state !== "ready").length;
  }

  workerOf(replica) {
    return this.workers.find((worker) => worker.replica === replica);
  }

  meet(hello) {
    this.hello = hello;
    this.stepColumn = Object.fromEntries(hello.step_columns.map((name, place) => [name, place]));
  }

  update(news) {
    if (news.uptime_s < this.uptime) this.tallies = [];
    this.uptime = news.uptime_s;
    this.waiting = news.waiting;
    this.unfinished = news.unfinished;
    this.workers = news.workers;
    while (this.replicas.length < news.replicas.length) this.replicas.push(new Replica(this.replicas.length));
    this.replicas.length = news.replicas.length;
    news.replicas.forEach((replica, place) => this.replicas[place].update(replica, news.whole));
    if (news.requests) {
      const names = this.hello.request_columns;
      this.requests = news.requests.map((row) => Object.fromEntries(names.map((name, place) => [name, row[place]])));
    }
    this.#measure();
  }

  #measure() {
    const tokens = this.replicas.reduce((sum, replica) => sum + replica.info.generated_tokens, 0);
    this.tallies.push([this.uptime, tokens]);
    while (this.tallies.length > 2 && this.uptime - this.tallies[1][0] > RATE_WINDOW_S) this.tallies.shift();
    const [since, before] = this.tallies[0];
    this.rate = this.uptime > since ? (tokens - before) / (this.uptime - since) : 0;
  }

  total(name) {
    return this.replicas.reduce((sum, replica) => sum + replica.info[name], 0);
  }
}
