// The timeline over all steps: budget, free blocks and empty slots as curves, and a lane for each request.

const LEFT = 124, RIGHT = 12; // pixels beside the plot
const LANE = 15; // height of a request's lane

/** The frames that the timeline shows, and their positions. */
function scaleOf(view, width) {
  const all = Math.max(1, view.history.count), plot = Math.max(10, width - LEFT - RIGHT);
  const count = Math.min(all, Number(byId("zoom").value) || all);
  const from = Math.max(0, Math.min(all - count, view.index - Math.floor(count / 2)));
  return {
    count, from, to: from + count, plot,
    x: (index) => LEFT + (Math.min(Math.max(index, from), from + count) - from) * (plot / count),
    index: (x) => from + Math.floor(((x - LEFT) / plot) * count),
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
    const { view } = this, { order, all } = view.lives, key = `${view.index} ${view.chosen && view.chosen.n}`;
    if (key === this.seen || !order.length) return;
    this.seen = key;
    this.size();
    const chosen = view.chosen && view.chosen.kind === "request" ? all.get(view.chosen.n) : null;
    const alive = ({ spans }) => spans.length && spans[0].from <= view.index && spans[spans.length - 1].to > view.index;
    const first = Math.floor(this.box.scrollTop / LANE), fits = Math.max(1, Math.floor(this.box.clientHeight / LANE));
    const shown = order.slice(first, first + fits);
    if (chosen ? shown.includes(chosen) : shown.some(alive)) return;
    const at = chosen ? order.indexOf(chosen) : order.findIndex(alive);
    if (at >= 0) this.box.scrollTop = Math.max(0, (at - 1) * LANE);
  }

  size() {
    this.spacer.style.height = `${Math.max(0, this.view.lives.order.length * LANE + 4 - this.box.clientHeight)}px`;
  }

  // curves

  drawCurves() {
    const box = byId("curves"), width = box.clientWidth, height = box.clientHeight;
    const c = prepared(this.curve, width, height), scale = scaleOf(this.view, width), p = this.palette;
    const half = (height - 14) / 3;
    const { num_blocks: blocks, max_num_batched_tokens: budget, block_size: size } = this.view.config;
    const rows = [
      ["budget used", (f) => f.counts[0] / budget, p.accent],
      ["free blocks", (f) => (blocks - f.counts[1]) / blocks, p.soft],
      ["empty slots", (f) => (f.counts[1] ? f.counts[3] / (f.counts[1] * size) : 0), p.warn],
    ];
    rows.forEach(([name, value, ink], i) => this.curveRow(c, scale, 2 + i * (half + 4), half, name, value, ink));
    this.now(c, scale, height);
    const now = rows.map(([name, value]) => `${name} ${percent(value(this.view.frame))}`);
    this.curve.setAttribute("aria-label", `Over all steps. Now: ${now.join(", ")}`);
  }

  curveRow(c, scale, top, height, name, value, ink) {
    const { frames } = this.view.history, p = this.palette;
    c.fillStyle = p.faint;
    c.fillRect(LEFT, top, scale.plot, height);
    c.fillStyle = p.soft;
    c.font = `11px ${FONT}`;
    c.textBaseline = "middle";
    c.fillText(name, 0, top + height / 2);
    c.fillStyle = p.ink;
    const now = percent(value(this.view.frame));
    c.textAlign = "right";
    c.fillText(now, LEFT - 6, top + height / 2);
    c.textAlign = "left";
    c.beginPath();
    c.moveTo(LEFT, top + height);
    for (const [x, width, high] of columns(frames, value, scale)) {
      c.lineTo(x, top + height - high * height);
      c.lineTo(x + width, top + height - high * height);
    }
    c.lineTo(LEFT + scale.plot, top + height);
    c.fillStyle = ink;
    c.globalAlpha = 0.28;
    c.fill();
    c.globalAlpha = 1;
    c.strokeStyle = ink;
    c.lineWidth = 1.2;
    c.stroke();
  }

  now(c, scale, height) {
    const x = scale.x(this.view.index), width = Math.max(2, scale.plot / scale.count);
    c.fillStyle = this.palette.ink;
    c.globalAlpha = 0.1;
    c.fillRect(x, 0, width, height);
    c.globalAlpha = 1;
    c.fillRect(x, 0, 1, height);
  }

  // lanes

  drawLanes() {
    const { order } = this.view.lives, width = this.box.clientWidth, height = this.box.clientHeight;
    this.size();
    const c = prepared(this.lanes, width, height), scale = scaleOf(this.view, width);
    this.palette = palette();
    const first = Math.max(0, Math.floor(this.box.scrollTop / LANE));
    for (let i = first; i < Math.min(order.length, first + height / LANE + 2); i++) {
      this.lane(c, scale, order[i], i * LANE - this.box.scrollTop + 3);
    }
    this.now(c, scale, height);
  }

  lane(c, scale, life, y) {
    const p = this.palette, { chosen } = this.view, mine = chosen && chosen.kind === "request" && chosen.n === life.n;
    if (mine) (c.fillStyle = p.faint), c.fillRect(0, y - 1, c.canvas.width, LANE);
    c.fillStyle = p.of(life.n);
    c.fillRect(0, y + 3, 7, 7);
    c.fillStyle = mine ? p.ink : p.soft;
    c.font = `11px ${FONT}`;
    c.textBaseline = "middle";
    c.fillText(fitted(c, this.view.short(life.n), LEFT - 18), 11, y + LANE / 2 - 0.5);
    for (const { kind, from, to } of life.spans) {
      if (to <= scale.from || from >= scale.to) continue;
      const x = scale.x(from), width = Math.max(1, scale.x(to) - x - (scale.plot / scale.count > 6 ? 1 : 0));
      this.span(c, kind, life.n, x, y, width);
    }
    const { index, reason } = life.ended || { index: -1 };
    if (index > scale.from && index <= scale.to) this.end(c, scale.x(index), y, reason);
  }

  span(c, kind, n, x, y, width) {
    const p = this.palette, high = LANE - 4;
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

  end(c, x, y, reason) {
    c.fillStyle = reason === "abort" ? this.palette.warn : this.palette.ink;
    c.fillRect(x - 1, y, 2, LANE - 4);
  }

  // the pointer

  pressed(event, canvas) {
    const { x, life } = this.under(event, canvas), scale = scaleOf(this.view, canvas.clientWidth);
    if (life && x < LEFT) return this.view.choose({ kind: "request", n: life.n });
    if (life) this.view.choose({ kind: "request", n: life.n }, false);
    if (x >= LEFT) this.view.go(scale.index(x));
    if (scale.count < this.view.history.count) return; // dragging would move the steps under the pointer
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
    const life = canvas === this.lanes ? this.view.lives.order[Math.floor((y + this.box.scrollTop - 2) / LANE)] : null;
    return { x, life };
  }
}

const SPANS = {
  queued: "queued", prompt: "computes its prompt", again: "computes lost content again", decode: "decodes",
  pause: "waits for its turn", preempted: "preempted, back in the queue", swapped: "swapped out",
};

const percent = (share) => `${Math.round(100 * share)} %`;

/** [x, width, value] of each column of a curve: a frame, or the mean of the frames of one pixel. */
function* columns(frames, value, scale) {
  const per = Math.max(1, Math.ceil(scale.count / scale.plot));
  const start = Math.floor(scale.from / per) * per; // columns do not change when the window moves
  for (let i = start; i < scale.to; i += per) {
    const some = frames.slice(i, i + per);
    yield [scale.x(i), scale.x(i + some.length) - scale.x(i), some.reduce((sum, f) => sum + value(f), 0) / some.length];
  }
}
