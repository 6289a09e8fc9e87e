// The block grid: each block with its owners, its filled slots, and the slots that this step writes.

const GAP = 3;
const LARGEST = 32_768; // squares; in a larger pool a square represents several blocks

/** The layout of a number of blocks of `size` slots in a box. */
function gridLayout(blocks, size, width, height) {
  for (const slot of [58, 50, 42, 36, 30, 26]) {
    const found = inRows(blocks, size * slot + 4, 36, width, height);
    if (size <= 16 && found) return stretched({ ...found, kind: "words" }, size, width);
  }
  for (const slot of [16, 12, 9, 7, 5]) {
    const found = inRows(blocks, size * slot + 4, 26, width, height);
    if (size <= 16 && found) return stretched({ ...found, kind: "slots" }, size, width);
  }
  for (const side of [46, 38, 32, 27, 23, 19, 16, 14, 12, 10, 9]) {
    const found = inRows(blocks, side, side, width, height);
    if (found) return { ...found, kind: "squares" };
  }
  const per = Math.ceil(blocks / LARGEST), squares = Math.ceil(blocks / per), side = squares > 4096 ? 7 : 9;
  const gap = side > 8 ? 2 : 1, columns = Math.max(1, Math.floor(width / (side + gap)));
  return { kind: "dots", w: side, h: side, gap, columns, rows: Math.ceil(squares / columns), per };
}

/** The same columns, over the whole width. */
function stretched(lay, size, width) {
  const w = Math.min((width - (lay.columns - 1) * lay.gap) / lay.columns, size * 76 + 4);
  return { ...lay, w, slot: (w - 4) / size };
}

function inRows(blocks, w, h, width, height) {
  const gap = Math.min(GAP, Math.max(2, w / 8));
  const columns = Math.floor((width + gap) / (w + gap));
  const rows = Math.ceil(blocks / Math.max(1, columns));
  return columns && rows * (h + gap) - gap <= height ? { w, h, gap, columns, rows, per: 1 } : null;
}

class Grid {
  constructor(view) {
    this.view = view;
    this.canvas = byId("grid");
    this.box = byId("gridbox");
    this.cursor = 1;
    this.canvas.addEventListener("click", (event) => this.clicked(event));
    this.canvas.addEventListener("mousemove", (event) => this.hovered(event));
    this.canvas.addEventListener("mouseleave", () => this.view.tip(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    for (const kind of ["focus", "blur"]) this.canvas.addEventListener(kind, () => this.draw());
  }

  draw() {
    const { picture, config } = this.view;
    if (!config) return;
    const width = this.box.clientWidth - 8, height = this.box.clientHeight - 8;
    const lay = gridLayout(config.num_blocks, config.block_size, width, height);
    this.lay = lay;
    const c = prepared(this.canvas, width, Math.max(1, lay.rows * (lay.h + lay.gap) - lay.gap));
    this.owners = owners(picture, (this.view.config.views || []).length || 1);
    this.progress = progress(picture);
    this.palette = palette();
    const squares = Math.ceil(config.num_blocks / lay.per);
    for (let i = 0; i < squares; i++) this.square(c, i);
    this.marks(c);
    this.canvas.setAttribute("aria-label", `${config.num_blocks} cache blocks. ${this.says(this.cursor)}`);
  }

  place(i) {
    const { columns, w, h, gap } = this.lay;
    return [(i % columns) * (w + gap), Math.floor(i / columns) * (h + gap)];
  }

  square(c, i) {
    const [x, y] = this.place(i);
    if (this.lay.per > 1) return this.heap(c, i, x, y);
    const block = i + 1, mine = this.owners.get(block);
    if (!mine) return this.free(c, x, y, block);
    if (this.lay.kind === "dots") this.dot(c, x, y, mine);
    else if (this.lay.kind === "squares") this.fill(c, x, y, block, mine);
    else this.words(c, x, y, block, mine);
  }

  free(c, x, y, block) {
    const { w, h, kind } = this.lay, p = this.palette, idle = this.view.picture.published[block];
    c.fillStyle = p.free;
    c.fillRect(x, y, w, h);
    if (idle && w >= 12) hatched(c, x, y, w, h, p.idle);
    else if (idle) this.tinted(c, x, y);
    c.strokeStyle = idle ? p.idle : p.freeline;
    c.lineWidth = 1;
    if (kind !== "dots") c.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    this.numbered(c, x, y, block, p.soft, idle && w >= 60 ? "cached" : ""); // in a small square the hatching is enough
  }

  /** A cached block too small for hatching. */
  tinted(c, x, y) {
    c.globalAlpha = 0.5;
    c.fillStyle = this.palette.idle;
    c.fillRect(x, y, this.lay.w, this.lay.h);
    c.globalAlpha = 1;
  }

  /** Tokens in a block over all its owners: before this step, computed, and kept after it (not those of rejected drafts). */
  filled(mine) {
    const size = this.view.config.block_size, found = [0, 0, 0];
    for (const [n, i] of mine) {
      const ends = this.progress.get(n) || [0, 0, 0];
      ends.forEach((end, k) => (found[k] = Math.max(found[k], Math.min(size, Math.max(0, end - i * size)))));
    }
    return found;
  }

  /** A square filled from below; what this step writes has a strong edge, and what it does not keep is crossed out. */
  fill(c, x, y, block, mine) {
    const { w, h } = this.lay, p = this.palette, size = this.view.config.block_size;
    const [before, after, kept] = this.filled(mine);
    this.striped(c, x, y, w, h, mine, p.pale);
    const level = Math.round((h * after) / size), low = Math.round((h * kept) / size);
    this.striped(c, x, y + h - low, w, low, mine, p.of);
    if (level > low) crossedOut(c, x, y + h - level, w, level - low, p);
    if (after > before) {
      c.fillStyle = p.new;
      const wet = Math.max(2, Math.round((h * (after - before)) / size));
      c.fillRect(x, y + h - level, Math.max(2, w * 0.09), Math.min(level, wet));
    }
    if (this.view.picture.published[block]) this.findable(c, x, y);
    if (w >= 23) this.numbered(c, x, y, block, p.text(mine[0][0]), mine.length > 1 ? `×${mine.length}` : "");
    else if (mine.length > 1 && w >= 14) this.count(c, x, y, mine.length);
  }

  dot(c, x, y, mine) {
    const { w, h } = this.lay, [, , kept] = this.filled(mine); // too small to cross out what is not kept
    this.striped(c, x, y, w, h, mine, this.palette.pale);
    const level = Math.max(1, Math.round((h * kept) / this.view.config.block_size));
    this.striped(c, x, y + h - level, w, level, mine, this.palette.of);
  }

  /** Several blocks in one square: the number of them with an owner, and the colour of the first. */
  heap(c, i, x, y) {
    const { w, h, per } = this.lay, p = this.palette;
    let used = 0, idle = 0, first = null;
    for (let block = i * per + 1; block <= Math.min((i + 1) * per, this.view.config.num_blocks); block++) {
      const mine = this.owners.get(block);
      if (mine) [used, first] = [used + 1, first ?? mine[0][0]];
      else if (this.view.picture.published[block]) idle++;
    }
    c.fillStyle = p.free;
    c.fillRect(x, y, w, h);
    c.fillStyle = p.idle;
    c.fillRect(x, y, w, (h * (used + idle)) / per);
    if (used) (c.fillStyle = p.of(first)), c.fillRect(x, y, w, (h * used) / per);
  }

  /** A block with visible slots, and their tokens if they are known and there is room. */
  words(c, x, y, block, mine) {
    const { w, h, slot, kind } = this.lay, p = this.palette, size = this.view.config.block_size;
    this.striped(c, x, y, w, h, mine, p.pale);
    const top = kind === "words" ? 14 : 9, high = h - top - 2;
    const [before, after, kept] = this.filled(mine), [n, i] = mine[0], life = this.view.lives.all.get(n);
    for (let k = 0; k < size; k++) {
      const left = x + 2 + k * slot, width = slot - 1.5;
      c.fillStyle = k < kept ? (mine.length > 1 ? this.mixed(c, left, y + top, width, high, mine) : p.of(n)) : p.panel;
      c.globalAlpha = k < kept ? 1 : 0.55;
      c.fillRect(left, y + top, width, high);
      c.globalAlpha = 1;
      if (k >= before && k < after) (c.fillStyle = p.new), c.fillRect(left, y + h - 4, width, 2);
      if (k >= kept && k < after) crossedOut(c, left, y + top, width, high, p);
      if (kind === "words" && k < kept && life) this.word(c, left, y + top, width, high, life, i * size + k);
    }
    if (this.view.picture.published[block]) this.findable(c, x, y);
    this.numbered(c, x, y, block, p.ink, mine.length > 1 ? `×${mine.length}` : "");
  }

  word(c, x, y, width, height, life, position) {
    const text = this.view.words.at(life, position);
    c.fillStyle = this.palette.text(life.n);
    c.font = `11.5px ${FONT}`;
    c.textBaseline = "middle";
    // nearly all words begin with a space, which only takes room
    const shown = text === null ? `${position}` : visible(text.replace(/^ (?=.)/, ""));
    c.fillText(fitted(c, shown, width - 4), x + 3, y + height / 2 - 0.5);
  }

  /** Stripes in the colours of all owners of a block. */
  striped(c, x, y, w, h, mine, shade) {
    if (h <= 0) return;
    c.fillStyle = mine.length > 1 ? this.mixed(c, x, y, w, this.lay.h, mine, shade) : shade(mine[0][0]);
    c.fillRect(x, y, w, h);
  }

  mixed(c, x, y, w, h, mine, shade = this.palette.of) {
    const some = mine.slice(0, 4), mix = c.createLinearGradient(x, y, x + w, y + Math.min(h, w));
    some.forEach(([n], i) => {
      mix.addColorStop(i / some.length, shade(n));
      mix.addColorStop((i + 1) / some.length, shade(n));
    });
    return mix;
  }

  findable(c, x, y) {
    const { w } = this.lay, side = w >= 23 ? 7 : 4;
    c.fillStyle = this.palette.ink;
    c.beginPath();
    c.moveTo(x + w - side, y);
    c.lineTo(x + w, y);
    c.lineTo(x + w, y + side);
    c.fill();
  }

  numbered(c, x, y, block, ink, note) {
    const { w, h, kind } = this.lay;
    if (kind === "dots" || w < 23) return;
    c.font = `${kind === "slots" ? 8 : 10}px ${FONT}`;
    c.textBaseline = "top";
    c.fillStyle = ink;
    const inside = kind === "squares" ? 3 : 4;
    c.fillText(block, x + inside, y + 2);
    if (!note) return;
    const wide = c.measureText(note).width;
    if (kind === "squares") c.fillText(fitted(c, note, w - 5), x + inside, y + h - 13);
    else if (wide < w - 40) c.fillText(note, x + w - wide - 10, y + 2);
  }

  count(c, x, y, number) {
    c.font = `9px ${FONT}`;
    c.textBaseline = "middle";
    c.fillStyle = this.palette.ink;
    c.fillText(number, x + 2, y + this.lay.h / 2);
  }

  /** The chosen block, the blocks of the chosen request, and the keyboard's cursor. */
  marks(c) {
    const { chosen, picture } = this.view, p = this.palette, { w, h, per } = this.lay;
    const frame = (block, ink, line) => {
      const [x, y] = this.place(Math.floor((block - 1) / per));
      c.strokeStyle = ink;
      c.lineWidth = line;
      c.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    };
    const table = chosen && chosen.kind === "request" ? picture.tables.get(chosen.n) || [] : [];
    for (const block of table.filter(Boolean)) frame(block, p.ink, w > 9 ? 2 : 1);
    if (chosen && chosen.kind === "block") frame(chosen.block, p.ink, 2);
    if (document.activeElement === this.canvas) frame(this.cursor, p.accent, 2);
  }

  blockAt(event) {
    const box = this.canvas.getBoundingClientRect(), { w, h, gap, columns, per } = this.lay;
    const column = Math.floor((event.clientX - box.left) / (w + gap));
    const row = Math.floor((event.clientY - box.top) / (h + gap));
    const block = (row * columns + column) * per + 1;
    return column < columns && column >= 0 && block >= 1 && block <= this.view.config.num_blocks ? block : null;
  }

  clicked(event) {
    const block = this.blockAt(event);
    if (block) this.choose(block);
  }

  choose(block) {
    this.cursor = block;
    this.view.choose({ kind: "block", block });
  }

  hovered(event) {
    const block = this.blockAt(event);
    this.view.tip(block && this.says(block), event);
  }

  /** A block in words. */
  says(block) {
    const mine = (this.owners && this.owners.get(block)) || [], size = this.view.config.block_size;
    const published = this.view.picture.published[block];
    if (!mine.length) return `Block ${block}: ${published ? "cached, no owner" : "empty"}`;
    const [before, after, kept] = this.filled(mine), names = mine.slice(0, 6).map(([n]) => this.view.name(n)).join(", ");
    const owners = `${names}${mine.length > 6 ? " …" : ""}${mine.length > 1 ? ` (${mine.length} owners)` : ""}`;
    const wet = after > before ? `, ${after - before} written in this step` : "";
    const lost = after > kept ? `\n${after - kept} of them not kept: rejected drafts` : "";
    return `Block ${block}: ${owners}\n${after} of ${size} slots${wet}${lost}${published ? "\nothers can find it" : ""}`;
  }

  key(event) {
    const { columns, per } = this.lay, all = this.view.config.num_blocks;
    const by = { ArrowLeft: -per, ArrowRight: per, ArrowUp: -columns * per, ArrowDown: columns * per }[event.key];
    if (event.key === "Enter") this.choose(this.cursor);
    else if (by) this.cursor = Math.min(all, Math.max(1, this.cursor + by));
    else return;
    event.preventDefault();
    event.stopPropagation();
    this.reveal();
    this.draw();
    byId("gridsays").textContent = this.says(this.cursor);
  }

  reveal() {
    const { lay, box } = this, [, y] = this.place(Math.floor((this.cursor - 1) / lay.per));
    if (y < box.scrollTop) box.scrollTop = y;
    if (y + lay.h > box.scrollTop + box.clientHeight - 8) box.scrollTop = y + lay.h - box.clientHeight + 16;
  }
}

function hatched(c, x, y, w, h, ink) {
  c.save();
  c.beginPath();
  c.rect(x, y, w, h);
  c.clip();
  c.strokeStyle = ink;
  c.lineWidth = 1;
  c.beginPath();
  for (let d = -h; d < w; d += 6) c.moveTo(x + d, y + h), c.lineTo(x + d + h, y);
  c.stroke();
  c.restore();
}

/** A rectangle with a broken edge and a cross. */
function crossedOut(c, x, y, w, h, p) {
  c.save();
  c.fillStyle = p.panel;
  c.fillRect(x, y, w, h);
  c.strokeStyle = p.ink;
  c.lineWidth = 1;
  c.beginPath();
  c.moveTo(x, y), c.lineTo(x + w, y + h);
  c.moveTo(x, y + h), c.lineTo(x + w, y);
  c.stroke();
  c.setLineDash([2, 2]);
  c.strokeRect(x + 0.5, y + 0.5, w - 1, Math.max(0, h - 1));
  c.restore();
}
