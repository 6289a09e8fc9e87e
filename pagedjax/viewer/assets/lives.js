// The phases of each request, for the timeline, and its tokens. Grows with every frame.

class Lives {
  constructor() {
    this.all = new Map(); // number -> life
    this.order = [];
  }

  begin(record) {
    const [n, id, prompt, limit, priority, user, first, tags = []] = record;
    if (this.all.has(n)) return this.all.get(n);
    const life = { n, id, prompt, limit, priority, user, first, tags, spans: [], tokens: [], beam: false, ended: null };
    life.stepsWaited = new Map(); // limit -> steps in which it kept the request from a token
    this.all.set(n, life);
    this.order.push(life);
    return life;
  }

  /** Add a frame and its picture, at `index`. */
  take(frame, picture, index) {
    for (const record of frame.came || []) this.begin(record);
    for (const entry of frame.before || []) this.happened(entry, index, picture);
    picture.rows.forEach((row, i) => this.worked(row, frame.sampled && frame.sampled[i], index));
    for (const [n] of picture.still) this.during(n, "pause", index);
    for (const n of picture.waiting) this.during(n, this.waits(n), index);
    this.waited(picture);
    for (const entry of frame.after || []) this.happened(entry, index + 1, picture);
  }

  /** Count the step for each request that gets no token in it, by what keeps it out. */
  waited({ why, waiting, still }) {
    if (!why.length) return;
    const limits = new Map(why.flatMap(([, , numbers, limit]) => (numbers || []).map((n) => [n, limit])));
    const others = why.find((entry) => !entry[2]);
    for (const n of [...waiting, ...still.map((entry) => entry[0])]) {
      const life = this.all.get(n), limit = limits.get(n) || (others && others[3]);
      if (life && limit) life.stepsWaited.set(limit, (life.stepsWaited.get(limit) || 0) + 1);
    }
  }

  waits(n) {
    const life = this.all.get(n);
    return life && life.away ? life.away : "queued";
  }

  /** Record the phase of a request in a frame; equal neighbours become one span. */
  during(n, kind, index) {
    const life = this.all.get(n);
    if (!life) return;
    const last = life.spans[life.spans.length - 1];
    if (last && last.kind === kind && last.to === index) last.to = index + 1;
    else life.spans.push({ kind, from: index, to: index + 1 });
  }

  worked([n, ...row], sampled, index) {
    const life = this.all.get(n);
    if (!life) return;
    this.during(n, kindOf(life, ...row), index);
    const length = row[2];
    several(sampled).forEach((token, i) => (life.tokens[length + i] = token));
  }

  happened([what, n, ...rest], index) {
    const life = this.all.get(n);
    if (!life) return;
    if (what === "preempted") life.away = rest[0] ? "swapped" : "preempted";
    if (what === "admitted" || what === "resumed") life.away = null;
    if (what === "beamed") life.beam = true;
    if (what === "ended") life.ended = { index, reason: rest[0], outputs: rest[1] };
  }
}

/** The kind of a row: a part of the prompt, lost content computed again after a preemption, or a next token. */
function kindOf(life, start, count, length, drafts = 0) {
  if (length > life.prompt && (count - drafts > 1 || start < life.prompt)) return "again";
  return start < life.prompt ? "prompt" : "decode";
}

// Text ----------------------------------------------------------------------------------------------------------------

class Words {
  constructor(data) {
    this.words = data.words || {};
    this.fixes = data.fixes || {};
    this.prompts = data.prompts || {};
    this.labels = data.labels || {};
  }

  /** The text of the token at a position of a request; null if it is unknown. */
  at(life, position) {
    const source = life.first === null ? life.n : life.first;
    if (position < life.prompt) {
      const ids = this.prompts[source];
      return ids ? this.word(ids[position]) : null;
    }
    if (life.beam) return null; // its past changes when it continues from a sibling
    const token = life.tokens[position];
    if (token === undefined) return null;
    const fixed = (this.fixes[life.n] || {})[position - life.prompt];
    return fixed === undefined ? this.word(token) : fixed;
  }

  word(token) {
    return token in this.words ? this.words[token] : null;
  }

  /** A token for the reader: its text in quotes, or its number. */
  quoted(life, position, token) {
    const text = life ? this.at(life, position) : this.word(token);
    return text === null ? `token ${token}` : `“${visible(text)}”`;
  }

  label(life) {
    const source = life.first === null ? life.n : life.first;
    return this.labels[source] ?? null;
  }

  /** The generated text of a request, up to a position. */
  output(life, end) {
    let text = "";
    for (let p = life.prompt; p < Math.min(end, life.tokens.length); p++) {
      const piece = this.at(life, p);
      if (piece === null) return null;
      text += piece;
    }
    return text;
  }
}

/** A text with signs for its line breaks, tabs and outer spaces. */
function visible(text) {
  const lines = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return lines.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}
