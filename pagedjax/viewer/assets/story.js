// The log in sentences. The story of a request addresses the reader as the request: "You get block 5".

const many = (number, one, more = `${one}s`) => `${number} ${number === 1 ? one : more}`;
/** Numbers in words: runs of neighbours as first–last, and of many runs the first few and the last. */
function list(ids) {
  const runs = [];
  for (const id of ids) {
    const run = runs[runs.length - 1];
    if (run && run[1] + 1 === id) run[1] = id;
    else runs.push([id, id]);
  }
  const parts = runs.map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`));
  return parts.length > 8 ? `${parts.slice(0, 6).join(", ")} … ${parts[parts.length - 1]}` : parts.join(", ");
}

const blocksOf = (ids) => `${ids.length === 1 ? "block" : "blocks"} ${list(ids)}`;

const YOU = {
  submitted: (e, life) => `You arrive with ${many(life.prompt, "token")} and may grow to ${life.limit}.`,
  admitted: ([, , known, cached]) =>
    cached
      ? `You are admitted. ${cached} of your ${many(known, "token")} are in the cache already.`
      : `You are admitted, with ${many(known, "token")} to compute.`,
  resumed: () => "Your content returns from host memory, and you continue where you stopped.",
  preempted: ([, , swapped]) =>
    swapped
      ? "Too few blocks are free, so you are preempted. Your content moves to host memory."
      : "Too few blocks are free, so you are preempted. Your content is lost; you return to the front of the queue.",
  shared: ([, , ids]) =>
    `You share ${blocksOf(ids)}, which ${ids.length === 1 ? "holds" : "hold"} tokens that you begin with.`,
  allocated: ([, , ids]) => `You get ${blocksOf(ids)}.`,
  evicted: ([, , ids]) => `The old content of ${blocksOf(ids)} is evicted for you.`,
  copied: ([, , from, to]) => `Your next token goes to block ${from}. Others use it, so it is copied to ${to} for you.`,
  cached: ([, , ids]) => `You filled ${blocksOf(ids)}; others can find ${ids.length === 1 ? "it" : "them"} now.`,
  freed: ([, , ids]) => `Your ${blocksOf(ids)} ${ids.length === 1 ? "is" : "are"} empty again.`,
  kept: ([, , ids]) =>
    `You release ${blocksOf(ids)}, now without an owner. Others can still find the content.`,
  ended: ([, , reason, outputs]) =>
    `You end: ${WHY[reason] || reason}${outputs === null ? "" : `, after ${many(outputs, "token")}`}.`,
};
const WHY = {
  stop: "you reached a stop token or stop text",
  length: "you reached your maximum length",
  abort: "you were cancelled",
};

/** Sentences about a request: [{step, index, text}], consecutive tokens in one. */
function storyOf(life, history, names, words) {
  const lines = [];
  const say = (index, kind, text) => lines.push({ index, step: history.frames[index].step, kind, text });
  let run = null; // decode steps in a row
  const flush = () => {
    if (run) lines.push(decoded(run, words, life));
    run = null;
  };
  walk(history, (frame, picture, index) => {
    const at = picture.rows.findIndex(([n]) => n === life.n);
    const decodes = at >= 0 && kindOf(life, ...picture.rows[at].slice(1)) === "decode";
    const before = frame.before || [];
    if (decodes && !run && before.every(([what, n]) => n !== life.n || ASIDES.has(what))) begin(frame, index);
    for (const entry of before) take(entry, index);
    if (at >= 0) worked(picture.rows[at], frame.sampled && frame.sampled[at], picture.accepted[at], index, frame);
    for (const entry of frame.after || []) take(entry, index);
  });
  flush();
  return lines;

  function take(entry, index) {
    if (run && inRun(entry, life.n, run)) return; // part of a line of decodes
    const text = aboutYou(entry, life, names, words);
    if (!text) return;
    flush();
    say(index, entry[0], text);
  }

  function begin(frame, index) {
    const blocks = { taken: [], filled: [], lost: [], returned: [] };
    run = { index, step: frame.step, kind: "decode", got: [], steps: 0, drafts: 0, accepted: 0, ...blocks };
  }

  function worked([, start, count, length, drafts = 0], sampled, accepted, index, frame) {
    const kind = kindOf(life, start, count, length, drafts);
    const all = several(sampled).map((token, i) => [length + i, token]), got = all[0];
    if (kind === "decode") {
      if (!run) begin(frame, index);
      run.steps++;
      if (Number.isInteger(accepted)) [run.drafts, run.accepted] = [run.drafts + drafts, run.accepted + accepted];
      [run.last, run.until] = [frame.step, index];
      run.got.push(...all);
      return;
    }
    flush();
    const what = kind === "again" ? "lost content again" : "your prompt";
    const done = start + count >= length;
    const sample = got ? ` Your next token is ${words.quoted(life, ...got)}.` : "";
    const span = count === 1 ? `token ${start}` : `tokens ${start} to ${start + count - 1}`;
    say(index, kind, `You compute ${what}, ${span}${done ? "" : ` of ${length}; the rest follows later`}.${sample}`);
  }
}

const ASIDES = new Set(["allocated", "cached", "evicted"]);

/** Collects the blocks that a request gets and fills while it decodes, for the end of that line. */
function inRun([what, n, ids], me, run) {
  if (n === me && what === "freed" && run.drafts) return run.returned.push(...ids), true; // only rejected drafts used it
  if (n !== me || !ASIDES.has(what)) return false;
  ({ allocated: run.taken, cached: run.filled, evicted: run.lost })[what].push(...ids);
  return true;
}

/** One line for decode steps in a row. */
function decoded(run, words, life) {
  const { index, step, last, until, kind, got, steps, taken, filled, lost } = run;
  const pieces = got.map(([position]) => words.at(life, position));
  const text = pieces.includes(null) ? tokensOf(got) : `“${visible(pieces.join(""))}”`;
  const head = steps === 1 ? "You get your next token" : `You get a token in each of ${steps} steps`;
  const opening = run.drafts ? `You get ${many(got.length, "token")} in ${many(steps, "step")}` : head;
  const which = lost.length === taken.length ? "" : ` of ${list(lost)}`;
  const evicted = lost.length ? ` (the old content${which} is evicted)` : "";
  const both = [taken.length && `get ${blocksOf(taken)}${evicted}`, filled.length && `fill ${blocksOf(filled)}`];
  const work = both.filter(Boolean).join(" and "), found = filled.length ? ", which others can find now" : "";
  const whole = `${opening}${got.length ? `: ${text}` : ""}.${guesses(run)}${work ? ` You ${work}${found}.` : ""}`;
  return { index, until, step, last: last === step ? undefined : last, kind, text: whole };
}

/** The drafts of decode steps in a row, and the blocks that only rejected ones used. */
function guesses({ drafts, accepted, returned }) {
  if (!drafts) return "";
  const lost = drafts - accepted, back = returned.length ? ` You give back ${blocksOf(returned)}.` : "";
  return ` You had ${many(drafts, "draft")}: ${accepted} accepted, ${lost} rejected.${back}`;
}

/** Token ids, without joining neighbours to runs. */
function tokensOf(got) {
  const ids = got.map(([, token]) => token);
  return ids.length > 10 ? `${ids.slice(0, 8).join(", ")} … ${ids[ids.length - 1]}` : ids.join(", ");
}

function aboutYou(entry, life, names, words) {
  const [what, n] = entry;
  if (what === "forked") {
    const more = entry[2].length === 1 ? "1 branch begins" : `${entry[2].length} branches begin`;
    if (n === life.n) return `Your prompt is computed. ${more} on your blocks.`;
    return entry[2].includes(life.n) ? `You begin as a branch of ${names(n)}, on its blocks.` : null;
  }
  if (n !== life.n) return null;
  if (what === "beamed") {
    const from = entry[2] === n ? "your own tokens" : `the tokens of ${names(entry[2])}`;
    return `You continue from ${from}, with ${words.quoted(null, 0, entry[3])}.`;
  }
  return YOU[what] ? YOU[what](entry, life) : null;
}

const BLOCK = {
  shared: (who) => `${who} shares it.`,
  allocated: (who) => `${who} gets it.`,
  evicted: (who) => `Its old content is evicted, for ${who}.`,
  cached: (who) => `${who} has filled it; others can find it now.`,
  freed: (who) => `${who} releases it. It is empty now.`,
  kept: (who) => `${who} releases it. It has no owner now, but others can still find its content.`,
};

/** Sentences about a block. */
function storyOfBlock(block, history, names) {
  const lines = [];
  walk(history, (frame, picture, index) => {
    for (const entry of [...(frame.before || []), ...(frame.after || [])]) {
      const text = aboutBlock(entry, block, names);
      if (text) lines.push({ index, step: frame.step, kind: entry[0], text: text[0].toUpperCase() + text.slice(1) });
    }
    if (frame.published && frame.published.length === 1 && !frame.published[0].includes(block) && index) {
      const before = history.at(index - 1).published[block];
      if (before) lines.push({ index, step: frame.step, kind: "forgot", text: "The prefix cache is reset." });
    }
  });
  return lines;
}

function aboutBlock([what, n, ids, to], block, names) {
  if (what === "copied" && ids === block) return `It is copied to block ${to}, for ${names(n)}.`;
  if (what === "copied" && to === block) return `${names(n)} gets it, as a copy of block ${ids}.`;
  return BLOCK[what] && ids.includes(block) ? BLOCK[what](names(n)) : null;
}

/** Every frame with its picture. */
function walk(history, visit) {
  let picture = history.base;
  history.frames.forEach((frame, index) => {
    picture = applied(picture, frame, history.blocks);
    visit(frame, picture, index);
  });
}
