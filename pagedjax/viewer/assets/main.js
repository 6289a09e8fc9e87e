// The view: a run (or one of two), one step of it, perhaps a chosen request or block, and the objects that draw them.

class View {
  constructor(about, data) {
    this.index = 0;
    this.chosen = null;
    this.following = Boolean(about.live);
    this.data = data;
    this.track = new Track({}, data);
    this.tracks = [this.track];
    this.storyCache = new Map();
    this.grid = new Grid(this);
    this.timeline = new Timeline(this);
    byId("name").textContent = about.second ? `${about.name} and ${about.second.name}` : about.name || "";
    if (about.config) this.begin(about, null);
    this.controls = new Controls(this);
    new ResizeObserver(() => this.draw()).observe(document.querySelector("main"));
  }

  get about() {
    return this.track.about;
  }

  get config() {
    return this.track.config;
  }

  get history() {
    return this.track.history;
  }

  get lives() {
    return this.track.lives;
  }

  get words() {
    return this.track.words;
  }

  get speculates() {
    return this.track.speculates;
  }

  /** A run from its start, or from a picture. */
  begin(about, base) {
    this.index = 0;
    this.track = new Track(about, this.data, base);
    this.tracks = [this.track];
    this.storyCache.clear();
    this.describe();
  }

  /** Put another run of the same requests beside the first. */
  join(second) {
    const track = new Track(second.about, second);
    track.grow(second.frames);
    this.tracks = [this.track, track];
    this.timed = onOneAxis(this.tracks);
    this.pair = new Switch(this, this.data);
    this.describe();
  }

  /** Show the other one of two runs, at the same place of the axis. */
  show(k) {
    if (!this.tracks[k] || this.track === this.tracks[k]) return;
    const place = this.track.place(this.index);
    this.track = this.tracks[k];
    this.storyCache.clear();
    this.describe();
    this.go(this.track.indexAt(place));
  }

  describe() {
    const { about, config } = this;
    byId("facts").textContent = [
      `${config.num_blocks} blocks of ${config.block_size}`,
      `budget ${config.max_num_batched_tokens}`,
      `at most ${config.max_num_seqs} sequences`,
      `policy ${about.policy}`,
      config.host_blocks && `${config.host_blocks} host blocks`,
      about.version && `pagedjax ${about.version}`,
    ].filter(Boolean).join(" · ");
    const timed = this.pair ? this.timed : about.timed;
    this.note([
      about.truncated && "the recording is cut off",
      about.bare && "too many tokens: their text is left out",
      timed === false && `${this.pair ? "not both runs have times" : "no times recorded"}: one step is one unit`,
    ].filter(Boolean).join("; "));
  }

  grow(frames) {
    if (!frames.length) return;
    this.track.grow(frames);
    this.storyCache.clear();
    this.go(this.following ? this.history.count - 1 : this.index);
  }

  get frame() {
    return this.history.frames[this.index];
  }

  /** Show a step. In a running engine the page stays at an older step, and follows again from the newest step on. */
  go(index) {
    const last = this.history.count - 1;
    if (last < 0) return;
    this.index = Math.min(last, Math.max(0, index));
    this.picture = this.history.at(this.index);
    this.following = this.index === last;
    this.draw();
  }

  /** Open at what the address names: `#step=14` is a step, `#request=r00003` a request, `#run=2` the second run. */
  open(address) {
    const places = new URLSearchParams(address.replace(/^#/, "")), request = places.get("request");
    if (places.has("run")) this.show(Number(places.get("run")) - 1);
    if (places.has("step")) {
      const step = Number(places.get("step"));
      const index = this.history.frames.findLastIndex((frame) => frame.step === step && !frame.rest);
      if (index >= 0) this.go(index);
      else this.note(`there is no step ${places.get("step")}; the steps are 0 to ${this.history.frames.at(-1).step}`);
    }
    const life = request !== null && [...this.lives.all.values()].find((each) => each.id === request);
    if (life) this.choose({ kind: "request", n: life.n });
  }

  follow() {
    this.go(this.history.count - 1);
  }

  choose(chosen, draws = true) {
    this.chosen = chosen;
    if (draws) this.draw();
  }

  draw() {
    if (!this.picture || !this.controls) return;
    this.controls.draw();
    this.pair?.draw();
    byId("crossed").hidden = !this.speculates;
    byId("follow").setAttribute("aria-pressed", this.following);
    this.grid.draw();
    this.usage();
    drawBatch(this);
    drawQueues(this);
    this.timeline.draw();
    drawStory(this);
  }

  usage() {
    const [, used, idle, empty] = this.picture.counts, { num_blocks: all, block_size: size } = this.config;
    const wasted = used ? `, ${percent(empty / (used * size))} of slots empty` : "";
    const { per } = this.grid.lay, heaps = per > 1 ? `; a square is ${per} blocks` : "";
    byId("usage").textContent = `${used} of ${all} owned${wasted}${idle ? `, ${idle} cached` : ""}${heaps}`;
  }

  // words

  name(n) {
    const life = this.tracks.map(({ lives }) => lives.all.get(n)).find(Boolean);
    return life ? life.id : `#${n}`;
  }

  /** Its id and the beginning of its prompt. */
  short(n) {
    const life = this.lives.all.get(n), label = life && this.words.label(life);
    return label ? `${this.name(n)}  ${visible(label.slice(0, 40))}` : this.name(n);
  }

  called(n) {
    return `request ${this.name(n)}`;
  }

  title(n) {
    const life = this.lives.all.get(n), label = life && this.words.label(life);
    const text = label && (label.length > 300 ? `${label.slice(0, 300)} …` : label);
    return [this.called(n), this.pair?.runOf(n), text].filter(Boolean).join("\n");
  }

  kind([n, ...row]) {
    const life = this.lives.all.get(n);
    return life ? kindOf(life, ...row) : "decode";
  }

  when(index) {
    const frame = this.history.frames[index];
    if (!frame) return "";
    const time = frame.at ? ` · ${frame.at[0].toFixed(3)} s` : "";
    const of = frame.rest ? `before step ${frame.step}` : `step ${frame.step}`;
    return `${of} (${index + 1} of ${this.history.count})${time}`;
  }

  /** A story, computed once until the next frame. */
  stories(key, compute) {
    if (!this.storyCache.has(key)) this.storyCache.set(key, compute());
    return this.storyCache.get(key);
  }

  note(text) {
    byId("note").textContent = text;
  }

  tip(text, event) {
    const tip = byId("tip");
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const x = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 6), y = event.clientY + 16;
    tip.style.left = `${x}px`;
    tip.style.top = `${y + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 8 : y}px`;
  }
}

/** Data from `document.pack`. */
async function unpacked(letters) {
  const bytes = Uint8Array.from(atob(letters.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const about = JSON.parse(byId("about").textContent);
const packed = byId("data").textContent.trim();
const data = packed ? await unpacked(packed) : {};
const view = new View(about, data);
const watch = about.live ? new Watch(view, about.live) : null;
if (!watch) {
  view.grow(data.frames);
  if (data.second) view.join(data.second);
  view.go(0);
  view.open(location.hash || about.opens || "");
  addEventListener("hashchange", () => view.open(location.hash));
}

// For tests and readers: the shown picture as plain values.
window.pagedjax = {
  view,
  watch,
  shown: () => ({
    run: view.tracks.indexOf(view.track), index: view.index, count: view.history.count, step: view.picture.step, rest: view.picture.rest,
    tables: [...view.picture.tables].map(([n, table]) => [view.name(n), table]),
    cached: [...view.picture.published.keys()].filter((block) => view.picture.published[block]),
    waiting: view.picture.waiting.map((n) => view.name(n)),
    rows: view.picture.rows.map(([n, ...row]) => [view.name(n), ...row]),
  }),
};
