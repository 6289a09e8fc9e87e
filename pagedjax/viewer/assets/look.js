// Colours, and canvases that are sharp on every screen.

const GOLDEN = 137.508; // degrees: neighbours in number are far apart in hue

const NAMED = ["panel", "line", "ink", "soft", "faint", "accent", "free", "freeline", "idle", "new", "warn"];

const hue = (n) => (250 + n * GOLDEN) % 360;
const colour = (n) => `oklch(var(--light) var(--chroma) ${hue(n).toFixed(1)})`;

/** The theme's values for canvases, which cannot use CSS variables. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  const [light, chroma, pale] = ["light", "chroma", "pale"].map((name) => Number(get(name)));
  return {
    ...Object.fromEntries(NAMED.map((name) => [name, get(name)])),
    of: (n) => `oklch(${light} ${chroma} ${hue(n).toFixed(1)})`,
    pale: (n) => `oklch(${pale} ${chroma * 0.36} ${hue(n).toFixed(1)})`,
    text: (n) => `oklch(${light > 0.7 ? 0.24 : 0.16} 0.05 ${hue(n).toFixed(1)})`,
  };
}

/** Size a canvas for the screen's pixels -> its empty context, in CSS pixels. */
function prepared(canvas, width, height) {
  const dense = Math.min(window.devicePixelRatio || 1, 2);
  const [w, h] = [Math.round(width * dense), Math.round(height * dense)];
  if (canvas.width !== w || canvas.height !== h) {
    [canvas.width, canvas.height] = [w, h];
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(dense, 0, 0, dense, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const FONT = 'system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif';

/** Text cut off to a width. */
function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(text.slice(0, end) + "…").width > width) end--;
  return end > 1 ? `${text.slice(0, end)}…` : "";
}

const element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
};

/** A remark in grey. */
const aside = (text, name = "p") => element(name, { className: "none", textContent: text });

const byId = (id) => document.getElementById(id);
