// A track: one run with its frames, its requests and its place on the time axis. A page has one track, or two.

class Track {
  constructor(about, data, base = null) {
    this.about = about;
    this.config = about.config;
    this.history = new History(about.config ? about.config.num_blocks : 1, base);
    this.lives = new Lives();
    this.words = new Words(data);
    this.speculates = Boolean(base && base.verified);
    this.places = null; // of two tracks: where each frame begins on the common axis, and where the last one ends
    if (!base) return;
    for (const record of base.came || []) this.lives.begin(record);
    for (const entry of base.after || []) this.lives.happened(entry, 0);
  }

  grow(frames) {
    for (const frame of frames) this.lives.take(frame, this.history.push(frame), this.history.count - 1);
    this.speculates ||= frames.some((frame) => frame.verified);
  }

  /** Where a frame begins on the axis: the number of the frame, unless the axis is that of two tracks. */
  place(index) {
    return this.places ? this.places[Math.min(index, this.places.length - 1)] : index;
  }

  /** The frame at a place of the axis; the first or the last one beyond them. */
  indexAt(place) {
    const found = this.places ? this.places.slice(0, -1).findLastIndex((begin) => begin <= place) : Math.floor(place);
    return Math.min(this.history.count - 1, Math.max(0, found));
  }
}

/** Put two tracks on one axis: of seconds, if both have times, else of steps. */
function onOneAxis(tracks) {
  const timed = tracks.every(({ about }) => about.timed);
  for (const track of tracks) {
    const { frames } = track.history, last = frames[frames.length - 1];
    track.places = frames.map((frame) => (timed ? (frame.at || [0])[0] : frame.step));
    if (!last) continue;
    const end = timed ? (last.at || [0, 0])[1] : last.step + 1;
    track.places.push(Math.max(end, track.places[frames.length - 1]));
  }
  return timed;
}

/** The row above the page of two runs: which one is shown, where they part, and whose requests are in one only. */
class Switch {
  constructor(view, data) {
    this.view = view;
    this.only = data.only;
    const box = byId("pair");
    box.hidden = false;
    this.buttons = view.tracks.map(({ about }, k) => {
      const button = element("button", { type: "button", textContent: `${k + 1}: ${about.name}` });
      button.title = `Show ${about.name} (${k + 1})`;
      button.addEventListener("click", () => view.show(k));
      return button;
    });
    box.append(...this.buttons, this.parting(data.parting), aside(this.inOne(), "span"));
  }

  parting(parting) {
    if (!parting) return element("span", { textContent: "all decisions are equal" });
    const ended = parting.indexOf(null);
    const k = ended === 0 ? 1 : 0, track = this.view.tracks[k], { step } = track.history.frames[parting[k]];
    const text = ended < 0 ? `the runs part in step ${step}` : `only ${track.about.name} has step ${step}`;
    const link = element("a", { href: `#step=${step}&run=${k + 1}`, textContent: text });
    // the address may be this one already
    link.addEventListener("click", () => this.view.open(link.hash));
    return link;
  }

  inOne() {
    const parts = this.only.map((numbers, k) => numbers.length && `${many(numbers.length, "request")} only in ${this.view.tracks[k].about.name}`);
    return parts.filter(Boolean).join(", ");
  }

  /** The run that alone has a request; "" if both have it. */
  runOf(n) {
    const k = this.only.findIndex((numbers) => numbers.includes(n));
    return k < 0 ? "" : `only in ${this.view.tracks[k].about.name}`;
  }

  draw() {
    this.buttons.forEach((button, k) => button.setAttribute("aria-pressed", this.view.track === this.view.tracks[k]));
  }
}
