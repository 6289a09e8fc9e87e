// The queues and the story as ordinary elements: buttons, lists, headings.

const MOST_CHIPS = 200; // of a queue; thousands of buttons would make the page slow

/** A button that shows the story of a request. */
function requestChip(view, n, note, key, label = "") {
  const mine = view.chosen && view.chosen.kind === "request" && view.chosen.n === n;
  const chip = element("button", { className: "chip", type: "button", title: view.title(n) },
    element("i"), element("b", { textContent: view.name(n) }), element("span", { textContent: note }));
  if (label) chip.append(element("em", { textContent: label }));
  chip.style.setProperty("--hue", colour(n));
  chip.dataset.key = key;
  if (mine) chip.setAttribute("aria-current", "true");
  chip.addEventListener("click", () => view.choose({ kind: "request", n }));
  return chip;
}

/** Replace the children of a box; the element with the keyboard's focus keeps it. */
function keepingFocus(box, children) {
  const key = box.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  box.replaceChildren(...children);
  const again = key && [...box.querySelectorAll("[data-key]")].find((one) => one.dataset.key === key);
  if (again) again.focus({ preventScroll: true });
}

function drawQueues(view) {
  const { picture } = view, away = new Map(picture.away), done = progress(picture);
  const waiting = picture.waiting.filter((n) => !away.has(n));
  const parts = [
    ...queue(view, "Running", [...picture.tables.keys()], (n) => running(view, n, done)),
    ...queue(view, "Waiting", waiting, (n) => waits(view, n)),
  ];
  if (away.size || view.config.host_blocks) {
    parts.push(...queue(view, "Swapped out", [...away.keys()], (n) => many(away.get(n), "block")));
  }
  if (picture.memory) {
    parts.push(element("h2", { textContent: "Memory of the policy" }), element("p", { className: "memory", textContent: picture.memory }));
  }
  keepingFocus(byId("queues"), parts);
}

function queue(view, title, numbers, note) {
  const head = element("h2", { textContent: title }, element("span", { textContent: numbers.length }));
  const shown = numbers.slice(0, MOST_CHIPS), whys = shown.map((n) => (whyOf(view.picture, n) || [""])[0]);
  const chips = shown.flatMap((n, i) => {
    const chip = queued(view, n, note(n), `${title}${n}`);
    // one sentence below the requests that it is true of
    return whys[i] && whys[i] !== whys[i + 1] ? [chip, element("p", { className: "why", textContent: whys[i] })] : [chip];
  });
  if (!numbers.length) chips.push(aside("none"));
  if (numbers.length > MOST_CHIPS) chips.push(aside(`and ${numbers.length - MOST_CHIPS} more`));
  return [head, ...chips];
}

/** A chip with the beginning of the prompt, if it is known, and the note behind it. */
function queued(view, n, note, key) {
  const life = view.lives.all.get(n), label = life && view.words.label(life);
  return label ? requestChip(view, n, visible(label.slice(0, 60)), key, note) : requestChip(view, n, note, key);
}

function running(view, n, done) {
  const life = view.lives.all.get(n), [, , after] = done.get(n) || [0, 0, 0];
  if (!life) return "";
  return after < life.prompt ? `${after}/${life.prompt}` : `${life.prompt}+${after - life.prompt}`;
}

function waits(view, n) {
  const life = view.lives.all.get(n);
  if (!life) return "";
  return `${life.away === "preempted" ? "preempted, " : ""}${many(life.prompt, "token")}`;
}

// The story -----------------------------------------------------------------------------------------------------------

function drawStory(view) {
  const { chosen } = view;
  byId("close").hidden = !chosen;
  const lines = byId("lines");
  lines.style.removeProperty("--hue");
  if (!chosen) {
    byId("whose").textContent = "Story";
    return lines.replaceChildren(...help(view));
  }
  const story = chosen.kind === "request" ? requestStory(view, chosen.n) : blockStory(view, chosen.block);
  const { title, intro, entries } = story;
  byId("whose").textContent = title;
  const follows = (line, i) => i > 0 && entries[i - 1].index === line.index && line.last === undefined;
  const items = entries.map((line, i) => storyLine(view, line, follows(line, i)));
  const top = lines.dataset.of === title ? lines.scrollTop : 0;
  const key = lines.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  lines.replaceChildren(...intro, element("ol", {}, ...items));
  lines.dataset.of = title;
  lines.scrollTop = top;
  if (key) lines.querySelector(`[data-key="${key}"]`)?.focus({ preventScroll: true });
  else lines.querySelector("li.now:last-of-type, li.now")?.scrollIntoView({ block: "nearest" });
}

function help(view) {
  const about = [
    "Click a request or a block to read its story.",
    `Each square is a cache block of ${many(view.config.block_size, "token slot")}, in the colour of the request ` +
      "that owns it. Squares of several colours are shared. Hatched squares are cached: they have no owner, but " +
      "their content can still be found. A filled corner means that others can find the block.",
    "The bar below shows the tokens that this step computes: decodes first, then prompt chunks (hatched), under one " +
      "budget.",
    view.speculates &&
      "A decode may have drafts: guesses of its next tokens, which the same step checks. Slots and parts of the bar " +
        "that are crossed out were rejected: computed and not kept.",
    view.pair &&
      "The timeline has both runs: of each request the first run above the second. The buttons, or the keys 1 and 2, show " +
        "the one or the other at the same time.",
    "Keys: ← → or , . one step · space plays · Home End · arrows in the grid move from block to block.",
  ];
  return about.filter(Boolean).map((text) => element("p", { className: "whose", textContent: text }));
}

function requestStory(view, n) {
  const life = view.lives.all.get(n);
  if (!life) return { title: `Request ${view.name(n)}`, intro: [aside(view.pair?.runOf(n) || "")], entries: [] };
  byId("lines").style.setProperty("--hue", colour(n));
  const entries = view.stories(`r${n}`, () => storyOf(life, view.history, (m) => view.name(m), view.words));
  const more = [
    view.pair?.runOf(n),
    life.first !== null && life.first !== n ? `a branch of ${view.name(life.first)}` : "",
    life.user && `user ${life.user}`,
    life.priority ? `priority ${life.priority}` : "",
    life.tags.length ? `tags ${life.tags.join(", ")}` : "",
  ].filter(Boolean);
  const kin = more.length ? element("p", { className: "whose", textContent: more.join(" · ") }) : null;
  const intro = [textNow(view, life), kin, waitedFor(life), ...whyNow(view, n), blocksNow(view, n)];
  return { title: `You are ${view.called(n)}`, intro: intro.filter(Boolean), entries };
}

/** The prompt, and in bold the text generated up to this step. */
function textNow(view, life) {
  const label = view.words.label(life), known = progress(view.picture).get(life.n);
  const row = view.picture.rows.findIndex(([n]) => n === life.n);
  const ended = life.ended && life.ended.index <= view.index;
  const right = row >= 0 ? view.picture.accepted[row] || 0 : 0;
  const end = ended ? Infinity : row >= 0 ? view.picture.rows[row][3] + 1 + right : known ? known[1] + 1 : 0;
  const output = view.words.output(life, end);
  if (label === null && !output) return null;
  return element("blockquote", {}, label ?? "…", element("mark", { textContent: output ?? "" }));
}

const WAITED = {
  tokens: "for tokens of the budget",
  rows: "for a row",
  blocks: "for blocks",
  piece: "for blocks in a row",
  policy: "refused by the policy",
  behind: "behind another",
  "left out": "left out by the policy",
  preempted: "preempted in them",
  preemption: "while others were preempted",
  "kind of step": "for a step of its kind",
  siblings: "for its other beams",
};

/** The steps in which it got no token, in the whole run, by what kept it out. */
function waitedFor({ stepsWaited }) {
  const parts = [...stepsWaited].sort((a, b) => b[1] - a[1]), total = parts.reduce((sum, [, steps]) => sum + steps, 0);
  if (!total) return null;
  const reasons = parts.map(([limit, steps]) => `${steps} ${WAITED[limit]}`).join(", ");
  return element("p", { className: "whose", textContent: `waited ${many(total, "step")}: ${reasons}` });
}

/** Why it gets no token in this step, and the request that is before it. */
function whyNow(view, n) {
  const [sentence, behind] = whyOf(view.picture, n) || [];
  if (!sentence) return [];
  const text = element("p", { className: "why", textContent: `In step ${view.picture.step}: ${sentence}.` });
  return behind === null ? [text] : [text, element("div", { className: "links" }, requestChip(view, behind, "", `w${behind}`))];
}

function blocksNow(view, n) {
  const table = (view.picture.tables.get(n) || []).filter(Boolean);
  if (!table.length) return null;
  const buttons = table.slice(0, 24).map((block) => blockLink(view, block));
  if (table.length > 24) buttons.push(aside(`and ${table.length - 24} more`, "span"));
  return element("div", { className: "links" }, ...buttons);
}

function blockLink(view, block) {
  const link = element("button", { type: "button", textContent: block, title: `Block ${block}` });
  link.setAttribute("aria-label", `Story of block ${block}`);
  link.dataset.key = `b${block}`;
  link.addEventListener("click", () => view.choose({ kind: "block", block }));
  return link;
}

function blockStory(view, block) {
  const entries = view.stories(`b${block}`, () => storyOfBlock(block, view.history, (n) => view.called(n)));
  const mine = view.grid.owners.get(block) || [];
  const intro = [element("p", { className: "whose", textContent: view.grid.says(block) })];
  const chips = mine.slice(0, 12).map(([n]) => requestChip(view, n, "", `o${n}`));
  if (chips.length) intro.push(element("div", { className: "links" }, ...chips));
  return { title: `Block ${block}`, intro, entries };
}

function storyLine(view, line, same) {
  const until = line.last === undefined ? "" : `–${line.last}`;
  const go = element("button", { className: "at", type: "button", textContent: `${line.step}${until}` });
  go.title = `Go to step ${line.step}`;
  go.dataset.key = `l${line.index}${line.kind}${line.text.length}`;
  go.setAttribute("aria-label", `Step ${line.step}`);
  go.addEventListener("click", () => view.go(line.index));
  const item = element("li", {}, go, element("p", { textContent: line.text }));
  const ends = line.until ?? line.index;
  if (line.index <= view.index && view.index <= ends) item.className = "now";
  else if (line.index > view.index) item.className = "later";
  if (same) item.classList.add("same"); // the same step as the line above: its number is not repeated
  return item;
}
