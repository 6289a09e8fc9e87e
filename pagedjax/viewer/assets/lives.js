// What each request lived through, for the timeline, and the tokens that it got. Grows with every frame.

class Lives {
  constructor() {
    this.all = new Map(); // number -> life
    this.order = [];
  }

  begin(record) {
    const [n, id, prompt, limit, priority, user, first] = record;
    if (this.all.has(n)) return this.all.get(n);
    const life = { n, id, prompt, limit, priority, user, first, spans: [], tokens: [], beam: false, ended: null };
    this.all.set(n, life);
    this.order.push(life);
    return life;
  }

  /** Take in a frame that became picture `picture` at `index`. */
  take(frame, picture, index) {
    for (const record of frame.came || []) this.begin(record);
    for (const entry of frame.before || []) this.happened(entry, index, picture);
    picture.rows.forEach((row, i) => this.worked(row, frame.sampled && frame.sampled[i], index));
    for (const [n] of picture.still) this.during(n, "pause", index);
    for (const n of picture.waiting) this.during(n, this.waits(n), index);
    for (const entry of frame.after || []) this.happened(entry, index + 1, picture);
  }

  waits(n) {
    const life = this.all.get(n);
    return life && life.away ? life.away : "queued";
  }

  /** Mark what a request does in a frame; neighbours of one kind become one span. */
  during(n, kind, index) {
    const life = this.all.get(n);
    if (!life) return;
    const last = life.spans[life.spans.length - 1];
    if (last && last.kind === kind && last.to === index) last.to = index + 1;
    else life.spans.push({ kind, from: index, to: index + 1 });
  }

  worked([n, start, count, length], token, index) {
    const life = this.all.get(n);
    if (!life) return;
    this.during(n, kindOf(life, start, count, length), index);
    if (token !== null && token !== undefined) life.tokens[length] = token;
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

/** What a row is to its request: a part of its prompt, the same once more after a preemption, or a next token. */
function kindOf(life, start, count, length) {
  if (length > life.prompt && (count > 1 || start < life.prompt)) return "again";
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

  /** The text of the token at a position of a request; null where it is not known. */
  at(life, position) {
    const source = life.first === null ? life.n : life.first;
    if (position < life.prompt) {
      const ids = this.prompts[source];
      return ids ? this.word(ids[position]) : null;
    }
    if (life.beam) return null; // its past changes as it goes on from siblings
    const token = life.tokens[position];
    if (token === undefined) return null;
    const fixed = (this.fixes[life.n] || {})[position - life.prompt];
    return fixed === undefined ? this.word(token) : fixed;
  }

  word(token) {
    return token in this.words ? this.words[token] : null;
  }

  /** A token for people: its text in quotes, or its number. */
  quoted(life, position, token) {
    const text = life ? this.at(life, position) : this.word(token);
    return text === null ? `token ${token}` : `“${visible(text)}”`;
  }

  label(life) {
    const source = life.first === null ? life.n : life.first;
    return this.labels[source] ?? null;
  }

  /** What a request has generated, up to a position. */
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

/** What cannot be seen at the edges of a text, as signs. */
function visible(text) {
  const lines = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return lines.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}
