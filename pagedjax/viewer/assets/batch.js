// The batch of one step: the tokens of each sequence, and their share of the budget.

const MOST_ROWS = 120; // chips in the list; the bar shows all rows

function drawBatch(view) {
  const { picture, config, frame } = view;
  const spent = picture.counts[0], budget = config.max_num_batched_tokens;
  byId("spent").textContent = picture.rest
    ? "no step runs"
    : `${spent} of ${budget} tokens, ${many(picture.rows.length, "sequence")}${chunks(view)}`;
  const bar = byId("budget");
  bar.replaceChildren(...picture.rows.map((row) => segment(view, row, budget)));
  bar.setAttribute("aria-label", `${spent} of ${budget} tokens of the budget are used`);
  const shown = picture.rows.slice(0, MOST_ROWS).map((row, i) => rowChip(view, row, frame.sampled && frame.sampled[i]));
  if (picture.rows.length > MOST_ROWS) shown.push(aside(`and ${picture.rows.length - MOST_ROWS} more`, "span"));
  keepingFocus(byId("rows"), shown);
}

function chunks(view) {
  const kinds = view.picture.rows.map((row) => view.kind(row));
  const decodes = kinds.filter((kind) => kind === "decode").length, prompts = kinds.length - decodes;
  const parts = [decodes && many(decodes, "decode"), prompts && many(prompts, "prompt chunk")].filter(Boolean);
  return parts.length ? ` (${parts.join(", ")})` : "";
}

function segment(view, row, budget) {
  const [n, , count] = row;
  const part = element("div", { className: view.kind(row), title: `${view.name(n)}: ${rowText(row, view)}` });
  part.style.setProperty("--hue", colour(n));
  part.style.width = `${(100 * count) / budget}%`;
  if (count / budget < 0.006) part.classList.add("thin"); // too thin for a gap beside it
  return part;
}

function rowText(row, view) {
  const [, start, count, length] = row, kind = view.kind(row);
  const span = count === 1 ? `${start}` : `${start}–${start + count - 1}`;
  if (kind === "decode") return `token ${start}`;
  return `${kind === "again" ? "again " : "prompt "}${span} of ${length}`;
}

function rowChip(view, row, token) {
  const [n, , , length] = row, life = view.lives.all.get(n);
  const chip = requestChip(view, n, rowText(row, view), `batch${n}`);
  if (token !== null && token !== undefined) {
    const text = life ? view.words.at(life, length) : null;
    chip.append(element("strong", { textContent: `→ ${text === null ? token : visible(text) || "…"}` }));
  }
  return chip;
}
