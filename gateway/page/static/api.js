// Requests to the gateway that served this page, with the key if it asks for one; and its event streams.

const KEY = "pageplane-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

export async function call(path, { headers = {}, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch(path, {
    cache: "no-store",
    ...options,
    headers: { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...headers },
  });
  if (answer.ok) return answer;
  const content = await answer.json().catch(() => null);
  throw new Refused(answer.status, content?.error?.message ?? `${answer.status} ${answer.statusText}`);
}

export const get = async (path, parameters) => (await call(`${path}?${new URLSearchParams(parameters)}`)).json();

export const post = (path, body, options = {}) =>
  call(path, {
    ...options,
    method: "POST",
    body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", ...options.headers },
  });

/** The events of a streamed answer: {name, data}, in order, until it ends. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const event = { name: "message", data: "" };
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        else if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      yield event;
    }
  }
}
