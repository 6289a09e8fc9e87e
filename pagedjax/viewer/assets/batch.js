// The batch of one step: the tokens of each sequence, and their share of the budget.

const MOST_ROWS = 120; // chips in the list; the bar shows all rows

function drawBatch(view) {
  const { picture, config, frame } = view;
  const spent = picture.counts[0], budget = config.max_num_batched_tokens;
  byId("spent").textContent = picture.rest
    ? `no step runs${verdicts(picture)}`
    : `${spent} of ${budget} tokens, ${many(picture.rows.length, "sequence")}${chunks(view)}${verdicts(picture)}`;
  const bar = byId("budget");
  bar.replaceChildren(...picture.rows.flatMap((row, i) => segments(view, row, picture.accepted[i], budget)));
  bar.setAttribute("aria-label", `${spent} of ${budget} tokens of the budget are used`);
  const chip = (row, i) => rowChip(view, row, frame.sampled && frame.sampled[i], picture.accepted[i]);
  const shown = picture.rows.slice(0, MOST_ROWS).map(chip);
  if (picture.rows.length > MOST_ROWS) shown.push(aside(`and ${picture.rows.length - MOST_ROWS} more`, "span"));
  keepingFocus(byId("rows"), shown);
}

function chunks(view) {
  const kinds = view.picture.rows.map((row) => view.kind(row));
  const decodes = kinds.filter((kind) => kind === "decode").length, prompts = kinds.length - decodes;
  const parts = [decodes && many(decodes, "decode"), prompts && many(prompts, "prompt chunk")].filter(Boolean);
  return parts.length ? ` (${parts.join(", ")})` : "";
}

/** The drafts of this step, and the share that was accepted in all steps so far. */
function verdicts({ rows, accepted, verified: [all, right] }) {
  const drafts = rows.reduce((sum, [, , , , k]) => sum + (k || 0), 0);
  const known = accepted.length ? accepted.reduce((sum, one) => sum + (one || 0), 0) : null;
  const step = drafts ? `; ${verdict(drafts, known)}` : "";
  return all ? `${step}; ${percent(right / all)} of ${all} drafts accepted so far` : step;
}

/** Null and undefined: the step did not end, or the request was cancelled while it ran. */
function verdict(drafts, accepted) {
  return Number.isInteger(accepted) ? `${accepted} of ${many(drafts, "draft")} accepted` : many(drafts, "draft");
}

/** A row's part of the budget, and behind it the part of its rejected drafts. */
function segments(view, row, accepted, budget) {
  const [, , count, , drafts] = row, lost = rejected(drafts, accepted), text = rowText(row, view, accepted);
  const parts = [segment(view, row, count - lost, view.kind(row), text, budget)];
  if (lost) parts.push(segment(view, row, lost, "rejected", `${many(lost, "draft")} computed and not kept`, budget));
  return parts;
}

function segment(view, [n], count, kind, text, budget) {
  const part = element("div", { className: kind, title: `${view.name(n)}: ${text}` });
  part.style.setProperty("--hue", colour(n));
  part.style.width = `${(100 * count) / budget}%`;
  if (count / budget < 0.006) part.classList.add("thin"); // too thin for a gap beside it
  return part;
}

function rowText(row, view, accepted) {
  const [, start, count, length, drafts] = row, kind = view.kind(row);
  const span = count === 1 ? `${start}` : `${start}–${start + count - 1}`;
  if (drafts) return `token ${start}, ${verdict(drafts, accepted)}`;
  if (kind === "decode") return `token ${start}`;
  return `${kind === "again" ? "again " : "prompt "}${span} of ${length}`;
}

function rowChip(view, row, sampled, accepted) {
  const [n, , , length, drafts] = row, life = view.lives.all.get(n), tokens = several(sampled);
  const chip = requestChip(view, n, rowText(row, view, accepted), `batch${n}`);
  const texts = tokens.map((token, i) => (life ? view.words.at(life, length + i) : null) ?? token);
  const shown = texts.map((text) => (typeof text === "number" ? text : visible(text) || "…"));
  const lost = rejected(drafts, accepted); // their tokens are not recorded, only their number
  if (tokens.length) chip.append(element("strong", { textContent: `→ ${shown.join(" ")}${lost ? ` ✗${lost}` : ""}` }));
  return chip;
}
