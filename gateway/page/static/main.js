// Puts the parts together: events of the feed go into the world, and what shows it is drawn once per frame.

import { post, get, setKey } from "./api.js";
import { Ask } from "./ask.js";
import { openFeed } from "./feed.js";
import { byId, clock, count, make, percent, setText } from "./format.js";
import { Happened } from "./happened.js";
import { blockTitle, describeBlock, Inspect, STATE_WORDS } from "./inspect.js";
import { Replicas } from "./replicas.js";
import { Requests } from "./requests.js";
import { drawCell } from "./tiles.js";
import { Tip } from "./tip.js";
import { World } from "./world.js";

const DETAILS_AFTER_MS = 120;
const LEGEND = {
  used: "in use",
  shared: "shared by several requests",
  cached: "free, content still findable",
  free: "free",
  null: "null block",
};

const world = new World();
const tip = new Tip();
const happened = new Happened(world);
const replicas = new Replicas(world, { point, pick, kill, tip });
const requests = new Requests(world, select);
const inspect = new Inspect(world, {
  table: (table) => replicas.show(table),
  select,
  close: () => select(null),
});
new Ask(world, follow);

let pointed = null;
let drawing = false;
let newest = null;

// ------------------------------------------------------------------------------------------------------------- feed

const feed = openFeed({
  hello(hello) {
    world.meet(hello);
    setText(byId("model"), hello.model);
    byId("model").title = hello.model;
    setText(byId("version"), `Pageplane ${hello.version}`);
    document.title = `Pageplane · ${hello.model}`;
    byId("key-form").hidden = true;
    byId("main").hidden = false;
  },
  snapshot(news) {
    world.update(news);
    happened.update();
    newest = new Date();
    const ready = world.replicas.length - world.down;
    if (!ready) say("down", "no worker", `No worker is in service. ${world.unfinished ? `${count(world.unfinished)} requests wait for one; none is lost.` : "New requests wait until one is back."}`, true);
    else if (world.down) say("degraded", "degraded", `${world.down} of ${world.replicas.length} replicas ${world.down === 1 ? "has" : "have"} no worker. Everything goes on with the rest.`);
    else say("live", "live");
    draw();
  },
  lost() {
    say("lost", "scheduler silent", `The scheduler does not answer. ${stale()} It is being restarted if it has died.`, true);
  },
  gone(seconds) {
    say("gone", "disconnected", `The gateway does not answer; next try in ${seconds < 1 ? "a moment" : `${Math.round(seconds)} s`}. ${stale()}`, true);
  },
  refused(message) {
    happened.say(message, "bad");
  },
  key() {
    say("gone", "key needed");
    byId("main").hidden = true;
    byId("key-form").hidden = false;
    byId("key").focus();
  },
});

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  feed.restart();
});

function stale() {
  return newest ? `What is shown is as of ${clock(newest)}.` : "";
}

function say(line, text, banner = "", bad = false) {
  document.body.dataset.line = line;
  setText(byId("line-text"), text);
  setText(byId("banner"), banner);
  byId("banner").hidden = !banner;
  byId("banner").classList.toggle("bad", bad);
}

// ------------------------------------------------------------------------------------------------------------- draw

function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const total = world.total("total_blocks");
    const running = world.total("running");
    setText(byId("total-running"), count(running));
    setText(byId("total-waiting"), count(world.waiting));
    setText(byId("total-rate"), world.rate >= 10 || world.rate === 0 ? count(Math.round(world.rate)) : world.rate.toFixed(1));
    setText(byId("total-used"), percent(total - world.total("free_blocks"), total));
    setText(byId("total-hits"), percent(world.total("prefix_hits"), world.total("prefix_queries")));
    replicas.update();
    chooseOwn();
    requests.update();
    inspect.update();
  });
}

function drawLegend() {
  byId("legend").replaceChildren(
    ...Object.entries(LEGEND).map(([state, text]) => {
      const canvas = make("canvas", { width: 28, height: 28, "aria-hidden": "true" });
      drawCell(canvas.getContext("2d"), state, 28);
      return make("li", {}, canvas, text);
    }),
  );
}

drawLegend();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawLegend();
  replicas.redraw();
});

// -------------------------------------------------------------------------------------------------- select and point

function select(id) {
  requests.select(id);
  if (id === null) inspect.hide();
  else inspect.showRequest(id);
}

function pick(replica, block) {
  requests.select(null);
  inspect.showBlock(replica.index, block);
}

/** A request of one's own is on its way: selected as soon as it is seen. */
function follow(prefix) {
  requests.own = prefix;
  requests.followed = false;
}

function chooseOwn() {
  if (!requests.own || requests.followed) return;
  const own = world.requests.find((request) => requests.isOwn(request.id));
  if (!own) return;
  requests.followed = true;
  select(own.id);
}

function point(replica, block, at, how = "pointer") {
  const key = block === null || block === undefined ? null : `${replica.index}/${block}`;
  if (key === null) {
    pointed = null;
    tip.hide();
    return;
  }
  const title = `Block ${count(block)}: ${STATE_WORDS[world.hello.block_states[replica.cells[block]]]}`;
  const same = pointed?.key === key;
  tip.show(at, same && pointed.lines ? [pointed.title, ...pointed.lines] : [title]);
  if (same) {
    pointed.at = at;
    return;
  }
  clearTimeout(pointed?.timer);
  const mine = { key, at, title };
  pointed = mine;
  mine.timer = setTimeout(async () => {
    if (pointed !== mine) return;
    const info = await get("/v1/page/block", { replica: replica.index, block_id: block }).catch(() => null);
    if (!info || pointed !== mine) return;
    mine.title = blockTitle(info);
    mine.lines = describeBlock(info);
    tip.show(mine.at, [mine.title, ...mine.lines]);
    if (how === "keyboard") setText(byId("spoken"), [mine.title, ...mine.lines].join(". "));
  }, DETAILS_AFTER_MS);
}

async function kill(worker) {
  const { token, header } = world.hello.kill;
  try {
    await post("/v1/page/kill", { worker_id: worker.worker_id, incarnation: worker.incarnation }, { headers: { [header]: token } });
    happened.say(`kill -9 ${worker.pid} (${worker.worker_id}) asked for`, "");
  } catch (error) {
    happened.say(`${worker.worker_id} was not killed: ${error.message}`, "bad");
  }
}
