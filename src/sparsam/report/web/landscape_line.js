// Losses along one direction

function lineChart(plot) {
  const tip = html("div", { class: "tip", hidden: "" });
  let marks, frame;

  function draw() {
    const width = plot.clientWidth;
    const tall = width < 460 ? 270 : 400;
    frame = { left: 52, right: width - 14, top: 12, bottom: tall - 40 };
    const xAt = (a) => frame.left + ((a / span + 1) / 2) * (frame.right - frame.left);
    const yAt = (loss) => frame.bottom - height(loss) * (frame.bottom - frame.top);
    frame.xAt = xAt;
    frame.yAt = yAt;
    const root = svg("svg", { viewBox: `0 0 ${width} ${tall}`, role: "img", "aria-label": "Loss along a direction" });
    for (const tick of ticks(6)) {
      root.append(
        svg("line", { class: "grid", x1: frame.left, x2: frame.right, y1: yAt(tick), y2: yAt(tick) }),
        svg("text", { x: frame.left - 8, y: yAt(tick) + 4, "text-anchor": "end" }, number(tick)));
    }
    for (const t of [-1, -0.5, 0, 0.5, 1]) {
      const x = xAt(t * span);
      root.append(
        svg("line", { class: "grid", x1: x, x2: x, y1: frame.top, y2: frame.bottom }),
        svg("text", { x, y: frame.bottom + 18, "text-anchor": "middle" }, number(t * span)));
    }
    root.append(svg("text", { x: frame.right, y: tall - 4, "text-anchor": "end" }, "a, along the direction"));
    runs.forEach((run, index) => {
      if (hidden.has(index)) return;
      // The loss at w belongs to the line, also where no grid point is there.
      const line = [...axis.map((a, i) => [a, run.losses[i]]), [0, run.centre]].sort((p, q) => p[0] - q[0]);
      let pen = "M";
      const d = line.map(([a, loss]) => {
        const part = loss === null ? "" : `${pen}${xAt(a).toFixed(1)} ${yAt(loss).toFixed(1)}`;
        pen = loss === null ? "M" : "L";
        return part;
      });
      root.append(
        svg("path", { class: `line ${run.style}`, d: d.join(""), "data-run": index }),
        svg("circle", { class: `end ${run.style}`, cx: xAt(0), cy: yAt(run.centre), r: 4 }));
    });
    marks = root.appendChild(svg("g"));
    plot.replaceChildren(root, tip);
  }

  function show() {
    marks.replaceChildren();
    if (chosen < 0) {
      tip.hidden = true;
      return;
    }
    const x = frame.xAt(axis[chosen]);
    marks.append(svg("line", { class: "guide", x1: x, x2: x, y1: frame.top, y2: frame.bottom }));
    runs.forEach((run, index) => {
      if (hidden.has(index) || run.losses[chosen] === null) return;
      marks.append(svg("circle", { class: `mark ${run.style}`, cx: x, cy: frame.yAt(run.losses[chosen]), r: 4.5 }));
    });
    showTip(tip, x, frame.top + 60);
  }

  const point = (event) => {
    const x = event.clientX - plot.getBoundingClientRect().left;
    const at = ((x - frame.left) / (frame.right - frame.left)) * (n - 1);
    choose(clamp(Math.round(at), 0, n - 1));
  };
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");
  plot.setAttribute("aria-label", "Loss along one direction. Arrow keys show values.");
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", () => choose(-1));
  plot.addEventListener("blur", () => choose(-1));
  plot.addEventListener("keydown", (event) => {
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    choose(moved(event.key), true);
  });
  return { draw, show };
}
