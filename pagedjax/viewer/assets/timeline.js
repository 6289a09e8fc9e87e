// The timeline over all steps: budget, free blocks and empty slots as curves, and a lane for each request.

const LEFT = 124, RIGHT = 12; // pixels beside the plot
const LANE = 15; // height of a request's lane
const LANES_OF_TWO = 22; // of its two lanes, where a page has two runs

/** The part of the axis that the timeline shows, and positions in it. */
function scaleOf(view, width) {
  const { track, tracks } = view, plot = Math.max(10, width - LEFT - RIGHT);
  const begin = Math.min(...tracks.map((each) => each.place(0)));
  const end = Math.max(...tracks.map((each) => each.place(each.history.count))), steps = Math.max(1, track.history.count);
  const all = Math.max(end - begin, 1e-6), zoom = Number(byId("zoom").value) || steps;
  const span = Math.min(all, (all * zoom) / steps), middle = view.pair ? span / 2 : Math.floor(span / 2);
  const from = Math.max(begin, Math.min(end - span, track.place(view.index) - middle));
  return {
    from, to: from + span, plot, zoomed: span < all, wide: plot / (span / all) / steps > 6,
    x: (each, index) => LEFT + (Math.min(Math.max(each.place(index), from), from + span) - from) * (plot / span),
    index: (x) => track.indexAt(from + ((x - LEFT) / plot) * span),
  };
}

class Timeline {
  constructor(view) {
    this.view = view;
    this.lanes = byId("lanes");
    this.curve = byId("curve");
    this.box = byId("lanebox");
    this.spacer = element("div");
    this.box.append(this.spacer);
    this.box.addEventListener("scroll", () => this.drawLanes());
    for (const canvas of [this.lanes, this.curve]) {
      canvas.addEventListener("pointerdown", (event) => this.pressed(event, canvas));
      canvas.addEventListener("pointermove", (event) => this.moved(event, canvas));
      canvas.addEventListener("pointerleave", () => this.view.tip(null));
    }
  }

  draw() {
    this.palette = palette();
    this.reveal();
    this.drawCurves();
    this.drawLanes();
  }

  /** Scroll to the requests of this step, or to the chosen one, if the choice changed and none of them is visible. */
  reveal() {
    const { view } = this, { all } = view.lives, order = this.order(), key = `${view.index} ${view.chosen && view.chosen.n}`;
    if (key === this.seen || !order.length) return;
    this.seen = key;
    this.size();
    const chosen = view.chosen && view.chosen.kind === "request" ? all.get(view.chosen.n) : null;
    const alive = ({ spans }) => spans.length && spans[0].from <= view.index && spans[spans.length - 1].to > view.index;
    const lane = this.lane(), first = Math.floor(this.box.scrollTop / lane);
    const shown = order.slice(first, first + Math.max(1, Math.floor(this.box.clientHeight / lane)));
    if (chosen ? shown.includes(chosen) : shown.some(alive)) return;
    const at = chosen ? order.indexOf(chosen) : order.findIndex(alive);
    if (at >= 0) this.box.scrollTop = Math.max(0, (at - 1) * lane);
  }

  /** The requests in the order of their lanes; of two runs the requests of both. */
  order() {
    const { pair, tracks, lives } = this.view;
    if (!pair) return lives.order;
    const all = new Map(tracks.toReversed().flatMap((track) => [...track.lives.all]));
    for (const [n, life] of lives.all) all.set(n, life);
    return [...all.values()].sort((a, b) => a.n - b.n);
  }

  /** The height of a lane. */
  lane() {
    return this.view.pair ? LANES_OF_TWO : LANE;
  }

  size() {
    this.spacer.style.height = `${Math.max(0, this.order().length * this.lane() + 4 - this.box.clientHeight)}px`;
  }

  // curves

  drawCurves() {
    const box = byId("curves"), width = box.clientWidth, height = box.clientHeight;
    const c = prepared(this.curve, width, height), scale = scaleOf(this.view, width), p = this.palette;
    const half = (height - 14) / 3;
    const rows = [
      ["budget used", (f, { max_num_batched_tokens: budget }) => f.counts[0] / budget, p.accent],
      ["free blocks", (f, { num_blocks: blocks }) => (blocks - f.counts[1]) / blocks, p.soft],
      ["empty slots", (f, { block_size: size }) => (f.counts[1] ? f.counts[3] / (f.counts[1] * size) : 0), p.warn],
    ];
    rows.forEach(([name, value, ink], i) => this.curveRow(c, scale, 2 + i * (half + 4), half, name, value, ink));
    this.now(c, scale, height);
    const now = rows.map(([name, value]) => `${name} ${percent(value(this.view.frame, this.view.config))}`);
    this.curve.setAttribute("aria-label", `Over all steps. Now: ${now.join(", ")}`);
  }

  curveRow(c, scale, top, height, name, value, ink) {
    const { track, tracks, config, frame } = this.view, p = this.palette;
    c.fillStyle = p.faint;
    c.fillRect(LEFT, top, scale.plot, height);
    c.fillStyle = p.soft;
    c.font = `11px ${FONT}`;
    c.textBaseline = "middle";
    c.fillText(name, 0, top + height / 2);
    c.fillStyle = p.ink;
    const now = percent(value(frame, config));
    c.textAlign = "right";
    c.fillText(now, LEFT - 6, top + height / 2);
    c.textAlign = "left";
    const path = (each) => {
      let right = LEFT;
      c.beginPath();
      c.moveTo(LEFT, top + height);
      for (const [x, width, high] of columns(each, value, scale)) {
        c.lineTo(x, top + height - high * height);
        right = x + width;
        c.lineTo(right, top + height - high * height);
      }
      c.lineTo(right, top + height);
      c.strokeStyle = ink;
      c.lineWidth = 1.2;
    };
    path(track);
    c.fillStyle = ink;
    c.globalAlpha = 0.28;
    c.fill();
    c.globalAlpha = 1;
    c.stroke();
    for (const other of tracks.filter((each) => each !== track)) {
      path(other);
      c.setLineDash([3, 3]);
      c.stroke();
      c.setLineDash([]);
    }
  }

  now(c, scale, height) {
    const { track, index } = this.view, x = scale.x(track, index), width = Math.max(2, scale.x(track, index + 1) - x);
    c.fillStyle = this.palette.ink;
    c.globalAlpha = 0.1;
    c.fillRect(x, 0, width, height);
    c.globalAlpha = 1;
    c.fillRect(x, 0, 1, height);
  }

  // lanes

  drawLanes() {
    const order = this.order(), lane = this.lane(), width = this.box.clientWidth, height = this.box.clientHeight;
    this.size();
    const c = prepared(this.lanes, width, height), scale = scaleOf(this.view, width);
    this.palette = palette();
    const first = Math.max(0, Math.floor(this.box.scrollTop / lane));
    for (let i = first; i < Math.min(order.length, first + height / lane + 2); i++) {
      this.lanesOf(c, scale, order[i], i * lane - this.box.scrollTop + 3);
    }
    this.now(c, scale, height);
  }

  lanesOf(c, scale, life, y) {
    const p = this.palette, { chosen, tracks } = this.view, lane = this.lane(), mine = chosen && chosen.kind === "request" && chosen.n === life.n;
    if (mine) (c.fillStyle = p.faint), c.fillRect(0, y - 1, c.canvas.width, lane);
    c.fillStyle = p.of(life.n);
    c.fillRect(0, y + lane / 2 - 4.5, 7, 7);
    c.fillStyle = mine ? p.ink : p.soft;
    c.font = `11px ${FONT}`;
    c.textBaseline = "middle";
    c.fillText(fitted(c, this.view.short(life.n), LEFT - 18), 11, y + lane / 2 - 0.5);
    const high = this.view.pair ? 8 : LANE - 4;
    tracks.forEach((track, k) => {
      const its = track.lives.all.get(life.n);
      if (its) this.laneOf(c, scale, track, its, y + k * (high + 1), high);
    });
  }

  /** What a request did in one run. */
  laneOf(c, scale, track, life, y, high) {
    for (const { kind, from, to } of life.spans) {
      if (track.place(to) <= scale.from || track.place(from) >= scale.to) continue;
      const x = scale.x(track, from), width = Math.max(1, scale.x(track, to) - x - (scale.wide ? 1 : 0));
      this.span(c, kind, life.n, x, y, width, high);
    }
    if (!life.ended) return;
    const { index, reason } = life.ended, place = track.place(index);
    if (place > scale.from && place <= scale.to) this.end(c, scale.x(track, index), y, reason, high);
  }

  span(c, kind, n, x, y, width, high) {
    const p = this.palette;
    c.fillStyle = p.of(n);
    if (kind === "decode") c.fillRect(x, y + 2, width, high - 4);
    else if (kind === "prompt" || kind === "again") {
      c.fillRect(x, y, width, high);
      hatched(c, x, y, width, high, p.panel);
    } else if (kind === "pause") c.fillRect(x, y + high / 2 - 0.5, width, 1);
    else {
      const queued = kind === "queued";
      c.strokeStyle = queued ? p.soft : p.warn;
      c.setLineDash(queued ? [2, 3] : [4, 2]);
      c.lineWidth = queued ? 1 : 2;
      c.beginPath();
      c.moveTo(x, y + high / 2);
      c.lineTo(x + width, y + high / 2);
      c.stroke();
      c.setLineDash([]);
    }
  }

  end(c, x, y, reason, high) {
    c.fillStyle = reason === "abort" ? this.palette.warn : this.palette.ink;
    c.fillRect(x - 1, y, 2, high);
  }

  // the pointer

  pressed(event, canvas) {
    const { x, life } = this.under(event, canvas), scale = scaleOf(this.view, canvas.clientWidth);
    if (life && x < LEFT) return this.view.choose({ kind: "request", n: life.n });
    if (life) this.view.choose({ kind: "request", n: life.n }, false);
    if (x >= LEFT) this.view.go(scale.index(x));
    if (scale.zoomed) return; // dragging would move the steps under the pointer
    canvas.setPointerCapture(event.pointerId);
    this.dragging = true;
    canvas.addEventListener("pointerup", () => (this.dragging = false), { once: true });
  }

  moved(event, canvas) {
    const { x, life } = this.under(event, canvas), scale = scaleOf(this.view, canvas.clientWidth);
    if (this.dragging) return this.view.go(scale.index(x));
    const index = scale.index(x), frame = this.view.history.frames[index];
    if (life && x < LEFT) return this.view.tip(this.view.title(life.n), event);
    if (!frame || x < LEFT) return this.view.tip(null);
    const span = life && life.spans.find(({ from, to }) => from <= index && index < to);
    this.view.tip(`${this.view.when(index)}${span ? `\n${this.view.name(life.n)}: ${SPANS[span.kind]}` : ""}`, event);
  }

  under(event, canvas) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const life = canvas === this.lanes ? this.order()[Math.floor((y + this.box.scrollTop - 2) / this.lane())] : null;
    return { x, life };
  }
}

const SPANS = {
  queued: "queued", prompt: "computes its prompt", again: "computes lost content again", decode: "decodes",
  pause: "waits for its turn", preempted: "preempted, back in the queue", swapped: "swapped out",
};

const percent = (share) => `${Math.round(100 * share)} %`;

/** [x, width, value] of each column of a curve: a frame, or the mean of the frames of one pixel. */
function* columns(track, value, scale) {
  const { frames } = track.history, first = track.indexAt(scale.from), last = track.indexAt(scale.to) + 1;
  const per = Math.max(1, Math.ceil((last - first) / scale.plot));
  const start = Math.floor(first / per) * per; // columns do not change when the window moves
  for (let i = start; i < last; i += per) {
    const some = frames.slice(i, i + per), sum = some.reduce((total, frame) => total + value(frame, track.config), 0);
    const x = scale.x(track, i);
    yield [x, scale.x(track, i + some.length) - x, sum / some.length];
  }
}
