// Frames to pictures, as in picture.py. A picture is never changed; the next one shares its parts.

const NOTHING = {
  step: 0, rest: true, waiting: [], rows: [], still: [], tables: new Map(), published: new Uint8Array(0), away: [], why: [], memory: "",
  counts: [0, 0, 0, 0], at: null, accepted: [], verified: [0, 0],
};
const KEYFRAME = 64; // frames from one kept picture to the next: a seek applies at most so many

/** A sequence after a splice: [items kept at the front, items kept at the back, new items between]. */
function spliced(old, change) {
  if (!change) return old;
  const [front, back, middle] = change;
  return [...old.slice(0, front), ...middle, ...(back ? old.slice(-back) : [])];
}

/** The rows of the next step if each row that still has blocks gets one more token. */
function expected(rows, tables) {
  return rows.filter(([n]) => tables.has(n)).map(([n, start, count]) => [n, start + count, 1, start + count + 1]);
}

function changedTables(old, changes) {
  if (!changes) return old;
  const tables = new Map(old);
  for (const [n, kept, blocks] of changes) {
    if (kept === null) tables.delete(n);
    else tables.set(n, (tables.get(n) || []).slice(0, kept).concat(blocks));
  }
  return tables;
}

function changedPublished(old, change, blocks) {
  if (!change && old.length) return old;
  const published = new Uint8Array(blocks + 1);
  if (!change) return published;
  if (change.length === 2) published.set(old);
  for (const block of change[0]) published[block] = 1;
  for (const block of change[1] || []) published[block] = 0;
  return published;
}

/** The picture after a frame. `blocks`: number of blocks in the pool. */
function applied(picture, frame, blocks) {
  const tables = changedTables(picture.tables, frame.tables);
  return {
    step: frame.step,
    rest: Boolean(frame.rest),
    waiting: spliced(picture.waiting, frame.waiting),
    rows: spliced(expected(picture.rows, tables), frame.rows),
    still: frame.still || [],
    tables,
    published: changedPublished(picture.published, frame.published, blocks),
    away: frame.away || [],
    why: frame.why || [],
    memory: frame.memory || "",
    counts: frame.counts,
    at: frame.at || null,
    accepted: frame.accepted || [],
    verified: frame.verified || picture.verified,
  };
}

/** The frames of a run. One picture is kept for every KEYFRAME frames, so that any other is computed quickly. */
class History {
  constructor(blocks, base = null) {
    this.blocks = blocks;
    this.base = base ? applied(NOTHING, base, blocks) : NOTHING;
    this.frames = [];
    this.kept = [];
    this.newest = this.base;
    this.last = [-1, this.base];
  }

  push(frame) {
    if (this.frames.length % KEYFRAME === 0) this.kept.push(this.newest);
    this.newest = applied(this.newest, frame, this.blocks);
    this.frames.push(frame);
    return this.newest;
  }

  get count() {
    return this.frames.length;
  }

  /** The picture of a frame, computed from the nearest kept one. */
  at(index) {
    const from = Math.floor(index / KEYFRAME) * KEYFRAME;
    let [i, picture] = this.last;
    if (i > index || i < from - 1) [i, picture] = [from - 1, this.kept[from / KEYFRAME]];
    while (i < index) picture = applied(picture, this.frames[++i], this.blocks);
    this.last = [index, picture];
    return picture;
  }
}

/** Tokens of each running request in the cache: n -> [before the step, computed, kept after it]. */
function progress(picture) {
  const found = new Map(picture.still.map(([n, computed]) => [n, [computed, computed, computed]]));
  picture.rows.forEach(([n, start, count, , drafts], i) => {
    const end = start + count;
    found.set(n, [start, end, end - rejected(drafts, picture.accepted[i])]);
  });
  return found;
}

/** Why a request gets no token in the step: [sentence, number of the request that is before it or null], or null. */
function whyOf(picture, n) {
  if (!picture.waiting.includes(n) && !picture.still.some(([m]) => m === n)) return null;
  return picture.why.find(([, , numbers]) => numbers && numbers.includes(n)) || picture.why.find((entry) => !entry[2]) || null;
}

/** Drafts of a row that are computed and not kept; 0 if the step's end is not known. */
function rejected(drafts, accepted) {
  return drafts && Number.isInteger(accepted) ? drafts - accepted : 0;
}

/** An entry of `sampled` as a list of tokens: a row with drafts has several. */
function several(sampled) {
  if (sampled === null || sampled === undefined) return [];
  return Array.isArray(sampled) ? sampled : [sampled];
}

/** The owners of each block: block -> [[number, the block's place in its sequence], ...]. With several groups of layers a
 * table has an entry for each of them; 0 is a block that the sequence does not have. */
function owners(picture, groups) {
  const found = new Map();
  for (const [n, table] of picture.tables) {
    table.forEach((block, entry) => {
      const i = Math.floor(entry / groups);
      if (block) found.has(block) ? found.get(block).push([n, i]) : found.set(block, [[n, i]]);
    });
  }
  return found;
}
