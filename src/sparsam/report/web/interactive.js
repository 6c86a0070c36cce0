// A plot that is drawn to its width and shows values at places ("stops"): line charts and heat maps

/**
 * Make a plot interactive.
 *
 * Pointer, tap and arrow keys choose one of the stops that the latest drawing left behind. A stop has `x` and `y` in
 * pixels, `title`, `rows` for the box of values, and `marks` that are drawn while it is chosen.
 *
 * @param plot The box to draw in.
 * @param draw Called with a width; returns {svg, stops, wide, first, move}: `wide` measures distance along x alone,
 *   `first` is where the keyboard starts, and `move(index, key)` says which stop an arrow key leads to.
 */
function interactive(plot, draw) {
  const tip = html("div", { class: "tip", hidden: "" });
  const spoken = html("div", { class: "unseen", "aria-live": "polite" });
  let drawing = null;
  let chosen = -1;
  let width = 0;
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");

  function redraw() {
    width = Math.round(plot.clientWidth);
    if (!width) return;
    choose(-1);
    drawing = draw(width);
    drawing.marks = drawing.svg.appendChild(svg("g"));
    plot.setAttribute("aria-label", `${drawing.svg.getAttribute("aria-label")} Arrow keys show values.`);
    plot.replaceChildren(drawing.svg, tip, spoken);
  }

  function choose(index, aloud = false) {
    chosen = index;
    if (drawing) drawing.marks.replaceChildren();
    tip.hidden = index < 0;
    if (index < 0) return;
    const stop = drawing.stops[index];
    drawing.marks.append(...stop.marks());
    const rows = stop.rows.map(({ method, name, text }) =>
      html("li", {}, swatch(method), html("span", {}, name), html("b", {}, text)));
    tip.replaceChildren(html("p", {}, stop.title), html("ul", {}, ...rows));
    if (aloud) spoken.textContent = [stop.title, ...stop.rows.map((row) => `${row.name} ${row.text}`)].join(", ");
    // Beside the place, on the side that has room, so that neither finger nor pointer hides it.
    const { offsetWidth: w, offsetHeight: h } = tip;
    const right = stop.x + 14 + w <= width;
    const x = right ? stop.x + 14 : Math.max(0, stop.x - 14 - w);
    const y = Math.min(Math.max(0, stop.y - h / 2), Math.max(0, plot.clientHeight - h));
    tip.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
  }

  function nearest(event) {
    const box = plot.getBoundingClientRect();
    const px = event.clientX - box.left;
    const py = event.clientY - box.top;
    let best = -1;
    let shortest = Infinity;
    drawing.stops.forEach((stop, index) => {
      const distance = drawing.wide ? Math.abs(stop.x - px) : Math.hypot(stop.x - px, stop.y - py);
      if (distance < shortest) [best, shortest] = [index, distance];
    });
    return best;
  }

  plot.addEventListener("pointermove", (event) => drawing && choose(nearest(event)));
  plot.addEventListener("pointerdown", (event) => drawing && choose(nearest(event)));
  plot.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && choose(-1));
  document.addEventListener("pointerdown", (event) => plot.contains(event.target) || choose(-1));
  plot.addEventListener("focus", () => {
    if (plot.matches(":focus-visible") && drawing?.stops.length) choose(drawing.first ?? 0, true);
  });
  plot.addEventListener("blur", () => choose(-1));
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") choose(-1);
    if (!event.key.startsWith("Arrow") || !drawing?.stops.length) return;
    event.preventDefault();
    choose(chosen < 0 ? drawing.first ?? 0 : drawing.move(chosen, event.key), true);
  });
  new ResizeObserver(() => Math.round(plot.clientWidth) !== width && redraw()).observe(plot);
  return redraw;
}
