// The prompt box: one request of one's own, streamed, under a name by which the page finds it among the others.

import { events, post, Refused } from "./api.js";
import { byId, count, setText } from "./format.js";

export class Ask {
  /** began(prefix): a request with this prefix of its id is on its way. */
  constructor(world, began) {
    this.world = world;
    this.began = began;
    this.abort = null;
    byId("ask-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
  }

  async #send() {
    const prompt = byId("prompt").value.trim();
    if (!prompt || this.abort) return;
    this.abort = new AbortController();
    this.text = "";
    this.usage = null;
    const name = `page-${crypto.getRandomValues(new Uint32Array(1))[0].toString(16)}`;
    this.#busy(true);
    this.began(`${name}-`);
    const began = performance.now();
    try {
      await this.#stream(prompt, name);
      const seconds = (performance.now() - began) / 1000;
      this.#note(this.usage ? this.#summary(seconds) : "ended");
    } catch (error) {
      if (error.name === "AbortError") this.#note("stopped; its blocks are free again");
      else this.#note(error instanceof Refused ? error.message : `the answer broke off: ${error.message}`, true);
    } finally {
      this.abort = null;
      this.#busy(false);
    }
  }

  async #stream(prompt, name) {
    const common = {
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: Number(byId("most").value),
      temperature: 0.7,
    };
    let answer;
    try {
      answer = await this.#post("/v1/chat/completions", { ...common, messages: [{ role: "user", content: prompt }] }, name);
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 400 || !/template/.test(error.message)) throw error;
      answer = await this.#post("/v1/completions", { ...common, prompt }, name); // the model holds no conversations
    }
    for await (const { data } of events(answer)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(500, chunk.error.message);
      const choice = chunk.choices?.[0];
      this.#add(choice?.delta?.content ?? choice?.text ?? "");
      if (chunk.usage) this.usage = chunk.usage;
    }
  }

  #post(path, body, name) {
    return post(path, body, { signal: this.abort.signal, headers: { "X-Request-Id": name } });
  }

  #add(text) {
    if (!text) return;
    const box = byId("answer-text");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
    this.text += text;
    box.textContent = this.text;
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  #summary(seconds) {
    const { prompt_tokens: prompt, completion_tokens: output, prompt_tokens_details: details } = this.usage;
    const cached = details?.cached_tokens ?? 0;
    return `${count(prompt)} prompt tokens, ${count(cached)} of them cached · ${count(output)} generated in ${seconds.toFixed(1)} s`;
  }

  #note(text, bad = false) {
    setText(byId("answer-note"), text);
    byId("answer-note").classList.toggle("bad", bad);
  }

  #busy(busy) {
    byId("send").disabled = busy;
    byId("stop").hidden = !busy;
    byId("answer-text").classList.toggle("waiting", busy);
    if (busy) {
      byId("answer").hidden = false;
      byId("answer-text").textContent = "";
      this.#note("");
    }
  }
}
