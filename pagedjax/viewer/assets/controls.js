// Slider, buttons, keys, theme: actions of the reader become calls of the view.

class Controls {
  constructor(view) {
    this.view = view;
    this.timer = null;
    const on = (id, act) => byId(id).addEventListener("click", act);
    on("first", () => view.go(0));
    on("back", () => view.go(view.index - 1));
    on("forward", () => view.go(view.index + 1));
    on("last", () => view.go(view.history.count - 1));
    on("play", () => this.toggle());
    on("theme", () => this.theme());
    on("follow", () => view.follow(true));
    on("close", () => view.choose(null));
    byId("slider").addEventListener("input", (event) => view.go(Number(event.target.value)));
    byId("speed").addEventListener("change", () => this.timer && this.start());
    byId("zoom").addEventListener("change", () => view.draw());
    document.addEventListener("keydown", (event) => this.key(event));
    const dark = matchMedia("(prefers-color-scheme: dark)");
    this.set(dark.matches ? "dark" : "light");
    dark.addEventListener("change", () => this.set(dark.matches ? "dark" : "light"));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = event.target, presses = target.closest && target.closest("button, select");
    if (event.key === " " && presses) return; // the key presses the button
    if (target.tagName === "SELECT" || target.type === "password") return;
    const { view } = this, last = view.history.count - 1;
    const act = {
      ArrowLeft: () => view.go(view.index - 1), ArrowRight: () => view.go(view.index + 1),
      ",": () => view.go(view.index - 1), ".": () => view.go(view.index + 1),
      PageUp: () => view.go(Math.max(0, view.index - 10)), PageDown: () => view.go(Math.min(last, view.index + 10)),
      1: () => view.show(0), 2: () => view.show(1),
      Home: () => view.go(0), End: () => view.go(last), " ": () => this.toggle(), Escape: () => view.choose(null),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  toggle() {
    if (this.timer) return this.stop();
    if (this.view.index >= this.view.history.count - 1) this.view.go(0);
    this.start();
  }

  start() {
    clearInterval(this.timer);
    this.timer = setInterval(() => this.tick(), 1000 / Number(byId("speed").value));
    this.pressed(true);
  }

  tick() {
    if (this.view.index >= this.view.history.count - 1) return this.stop();
    this.view.go(this.view.index + 1);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.pressed(false);
  }

  pressed(on) {
    const play = byId("play");
    play.setAttribute("aria-pressed", on);
    play.setAttribute("aria-label", on ? "Pause" : "Play");
  }

  theme() {
    this.set(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  }

  set(theme) {
    document.documentElement.dataset.theme = theme;
    this.view.draw();
  }

  draw() {
    const { view } = this, slider = byId("slider"), last = view.history.count - 1;
    slider.max = Math.max(0, last);
    slider.value = view.index;
    slider.setAttribute("aria-valuetext", view.when(view.index));
    byId("where").textContent = view.when(view.index);
    for (const id of ["first", "back"]) byId(id).disabled = view.index <= 0;
    for (const id of ["forward", "last"]) byId(id).disabled = view.index >= last;
  }
}
