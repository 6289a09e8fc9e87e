// A running engine: request the frames after the last one, often while there are some, less and less often otherwise.

const SOON = 250, SELDOM = 5_000, LOST = 15_000; // milliseconds
const MOST_FRAMES = 5_000; // then the page starts again with the frames that the engine still has

class Watch {
  constructor(view, url) {
    this.view = view;
    this.url = url;
    this.next = 0;
    this.run = null;
    this.wait = SOON;
    byId("follow").hidden = false;
    document.addEventListener("visibilitychange", () => document.hidden || this.soon());
    byId("key").addEventListener("submit", (event) => this.unlock(event));
    this.ask();
  }

  soon() {
    clearTimeout(this.timer);
    this.wait = SOON;
    this.ask();
  }

  async ask() {
    if (this.asking || this.locked) return;
    this.asking = true;
    try {
      const reply = await this.fetched();
      if (reply) {
        this.take(reply);
        this.view.note("");
      }
    } catch (error) {
      this.wait = Math.min(LOST, this.wait * 2);
      this.view.note(`no answer (${error.message}); trying again in ${Math.round(this.wait / 1000) || 1} s`);
    }
    this.asking = false;
    if (!document.hidden && !this.locked) this.timer = setTimeout(() => this.ask(), this.wait);
  }

  async fetched() {
    const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    const options = { cache: "no-store", headers, signal: AbortSignal.timeout(LOST) };
    const reply = await fetch(`${this.url}?since=${this.next}`, options);
    if (reply.status === 401) return this.lock();
    if (!reply.ok) throw new Error(`the server returned ${reply.status}`);
    return reply.json();
  }

  /** Ask the reader for the server's key, and send no request until then. The key stays in this page's memory. */
  lock() {
    this.locked = true;
    this.view.note(this.key ? "this is not the key of this server" : "this server requires its API key");
    byId("key").hidden = false;
    return null;
  }

  unlock(event) {
    event.preventDefault();
    const input = byId("key").querySelector("input");
    [this.key, this.locked, input.value] = [input.value.trim(), false, ""];
    byId("key").hidden = true;
    this.soon();
  }

  take(reply) {
    if (this.run !== null && reply.run !== this.run) this.next = 0; // another engine replies now
    const anew = reply.base || this.run === null;
    if (this.run !== null && reply.run !== this.run && !anew) {
      this.run = null;
      return this.later(true);
    }
    this.run = reply.run;
    if (anew) this.view.begin(reply.about, reply.base);
    this.next = reply.next;
    this.view.grow(reply.frames);
    if (this.view.history.count > MOST_FRAMES) this.next = 0;
    this.later(reply.frames.length > 0 || reply.more, reply.more);
  }

  later(news, more = false) {
    this.wait = more ? 0 : news ? SOON : Math.min(SELDOM, Math.max(SOON, this.wait * 1.5));
  }
}
