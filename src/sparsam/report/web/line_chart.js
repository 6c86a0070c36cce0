// Line charts: one line a run, and the mean of each method

/** One line for each run of the methods that are shown; points without a value are gaps. */
function lines(x, y) {
  return methods.flatMap((method, index) =>
    hidden.has(index) ? [] : method.runs.map((run) => ({
      method, index, run,
      points: run.epoch.map((epoch, i) => ({ epoch, x: run[x][i], y: run[y][i] })),
    })));
}

/** The runs behind a method's mean: as in the table, the finished ones, or all where none is. */
function counted(series) {
  const finished = series.filter(({ run }) => run.finished);
  return finished.length ? finished : series;
}

/** The mean of a method's runs, over the epochs that all of them have. */
function meanPoints(series) {
  const [first, ...others] = counted(series).map((s) => s.points);
  return first.map((p) => {
    const same = [p, ...others.map((points) => points.find((q) => q?.epoch === p?.epoch))];
    return same.every(Boolean) ? { x: mean(same.map((q) => q.x)), y: mean(same.map((q) => q.y)) } : null;
  });
}

function pathOf(points) {
  let pen = "M";
  return points.map((p) => {
    const move = p ? `${pen}${p.px.toFixed(1)} ${p.py.toFixed(1)}` : "";
    pen = p ? "L" : "M";
    return move;
  }).join("");
}

/** Fit axes to the points: the edges of the plot in pixels, and where a value lies. */
function fit(width, spec, usable) {
  const height = width < 460 ? 250 : 300;
  const frame = { width, height, left: 46, right: width - 12, top: 24, bottom: height - 38 };
  const points = spec.series.flatMap((s) => s.points.filter(usable));
  const xs = points.map((p) => p.x);
  let xLow = spec.shared ? least(xs) : 0, xHigh = most(xs);
  if (xHigh <= xLow) [xLow, xHigh] = [xLow - 0.5, xLow + 0.5];
  // The first half of training is the rise, which would flatten everything after it.
  const from = spec.closeup ? most(points.map((p) => p.epoch)) / 2 : 0;
  const ys = points.filter((p) => p.epoch >= from).map((p) => p.y * spec.yScale);
  let yLow = least(ys), yHigh = most(ys);
  if (spec.log) {
    const pad = yHigh > yLow ? (yHigh / yLow) ** 0.04 : 2;
    [yLow, yHigh] = [yLow / pad, yHigh * pad];
  } else {
    const pad = 0.05 * (yHigh - yLow) || 0.05 * yHigh || 1;
    [yLow, yHigh] = [spec.fromZero ? 0 : Math.max(0, yLow - pad), Math.min(spec.yMost, yHigh + pad)];
  }
  const part = spec.log
    ? (y) => Math.log(y / yLow) / Math.log(yHigh / yLow)
    : (y) => (y - yLow) / (yHigh - yLow);
  return {
    ...frame,
    xTicks: ticks(xLow, xHigh, width < 460 ? 4 : 6, spec.shared),
    yTicks: spec.log ? logTicks(yLow, yHigh) : ticks(yLow, yHigh, 5),
    xAt: (x) => frame.left + ((x - xLow) / (xHigh - xLow)) * (frame.right - frame.left),
    yAt: (y) => frame.bottom - part(y * spec.yScale) * (frame.bottom - frame.top),
  };
}

function drawAxes(root, { left, right, bottom, height, xTicks, yTicks, xAt, yAt }, spec) {
  for (const { value, text } of yTicks) {
    const y = yAt(value / spec.yScale);
    root.append(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
    root.append(svg("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, text));
  }
  for (const { value, text } of xTicks) {
    const x = xAt(value);
    root.append(svg("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
    root.append(svg("text", { x: Math.min(x, right - 4), y: bottom + 18, "text-anchor": "middle" }, text));
  }
  root.append(
    svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    svg("text", { x: 0, y: 11 }, spec.yLabel),
    svg("text", { x: right, y: height - 4, "text-anchor": "end" }, spec.xLabel));
}

/** Draw every run, and the mean of a method's runs over them: seeds stay faint, or methods become a thicket. */
function drawLines(area, placed, place) {
  const groups = methods.map((_, index) => placed.filter((series) => series.index === index));
  for (const group of groups) {
    for (const { method, index, run, points } of group) {
      const look = group.length > 1 ? "line faint" : "line";
      const names = { class: `${look} ${method.style}`, "data-method": index, "data-seed": run.seed };
      area.append(svg("path", { ...names, d: pathOf(points) }));
    }
  }
  for (const group of groups.filter((group) => group.length)) {
    const { method, index } = group[0];
    const points = meanPoints(group).map(place);
    const names = { class: `line mean ${method.style}`, "data-method": index };
    if (group.length > 1) area.append(svg("path", { ...names, d: pathOf(points) }));
    const end = points.findLast((p) => p);
    if (end) area.append(svg("circle", { class: `end ${method.style}`, cx: end.px, cy: end.py, r: 4 }));
  }
}

/**
 * Draw lines with axes.
 *
 * @param spec series; label, xLabel, yLabel; yText and xTitle (a value in words); yScale (a factor for the axis);
 *   yMost, fromZero, closeup and log (the y-axis); shared (whether series have the same x and are compared there).
 */
function lineChart(width, spec) {
  const usable = (p) => p.y !== null && (!spec.log || p.y > 0);
  const root = svg("svg", { role: "img", "aria-label": spec.label });
  if (!spec.series.some((s) => s.points.some(usable))) {
    root.setAttribute("viewBox", `0 0 ${width} 250`);
    root.append(svg("text", { class: "empty", x: width / 2, y: 125 }, "Nothing to show"));
    return { svg: root, stops: [] };
  }
  const frame = fit(width, spec, usable);
  const { left, right, top, bottom } = frame;
  root.setAttribute("viewBox", `0 0 ${width} ${frame.height}`);
  drawAxes(root, frame, spec);

  const clip = `clip-${spec.id}`;
  const inside = { x: left, y: top - 4, width: right - left + 8, height: bottom - top + 4 };
  root.append(svg("clipPath", { id: clip }, svg("rect", inside)));
  const area = root.appendChild(svg("g", { "clip-path": `url(#${clip})` }));
  const place = (p) => (p && usable(p) ? { ...p, px: frame.xAt(p.x), py: frame.yAt(p.y) } : null);
  const placed = spec.series.map((series) => ({ ...series, points: series.points.map(place) }));
  drawLines(area, placed, place);

  const mark = (series, p) => svg("circle", {
    class: `mark ${series.method.style}`, cx: p.px, cy: clamp(p.py, top, bottom), r: 4.5,
    "data-method": series.index, "data-seed": series.run.seed,
    "data-epoch": p.epoch, "data-x": p.x, "data-value": p.y,
  });
  const stopsOf = spec.shared ? comparing : pointing;
  return { svg: root, ...stopsOf(placed, spec, mark, top, bottom) };
}

/** A stop for each epoch: all methods side by side, each as the mean of its seeds. */
function comparing(placed, spec, mark, top, bottom) {
  const all = placed.flatMap((series) =>
    series.points.filter(Boolean).map((p) => ({ ...p, series, run: series.run })));
  const epochs = [...new Set(all.map((p) => p.epoch))].sort((a, b) => a - b);
  const stops = epochs.map((epoch) => {
    const here = all.filter((p) => p.epoch === epoch);
    const rows = methods.flatMap((method, index) => {
      const values = counted(here.filter(({ series }) => series.index === index)).map(({ y }) => y);
      return values.length ? [{ method, name: method.label, text: spec.yText(mean(values)), n: values.length }] : [];
    });
    const { px } = here[0];
    return {
      x: px, y: clamp(mean(here.map(({ py }) => py)), top, bottom), rows,
      title: rows.some(({ n }) => n > 1) ? `Epoch ${epoch}, mean of seeds` : `Epoch ${epoch}`,
      marks: () => [
        svg("line", { class: "guide", x1: px, x2: px, y1: top, y2: bottom }),
        ...here.map((p) => mark(p.series, p)),
      ],
    };
  });
  const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };
  const move = (index, key) => clamp(index + steps[key], 0, stops.length - 1);
  return { stops, wide: true, first: stops.length - 1, move };
}

/** A stop for each point: left and right lead along a run, up and down to the next run. */
function pointing(placed, spec, mark, top, bottom) {
  const stops = placed.flatMap((series, at) => series.points.filter(Boolean).map((p) => ({
    at, x: p.px, y: clamp(p.py, top, bottom), title: `Epoch ${p.epoch}, ${spec.xTitle(p.x)}`,
    rows: [{ method: series.method, name: `${series.method.label}, seed ${series.run.seed}`, text: spec.yText(p.y) }],
    marks: () => [mark(series, p)],
  })));
  const first = stops.findLastIndex((stop) => stop.at === stops[0].at);
  const move = (index, key) => {
    const { at, x } = stops[index];
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const next = index + (key === "ArrowRight" ? 1 : -1);
      return stops[next]?.at === at ? next : index;
    }
    const others = [...new Set(stops.map((stop) => stop.at))];
    const other = others[(others.indexOf(at) + (key === "ArrowDown" ? 1 : others.length - 1)) % others.length];
    const near = stops.filter((stop) => stop.at === other).sort((a, b) => Math.abs(a.x - x) - Math.abs(b.x - x))[0];
    return stops.indexOf(near);
  };
  return { stops, wide: false, first, move };
}
