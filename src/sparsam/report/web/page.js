"use strict";

(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const methods = data.methods;
  const hidden = new Set(); // indices of methods that the legend switched off

  // Small tools

  /** Make an SVG element. Attributes that are null are left out. */
  function svg(name, attributes = {}, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  /** Make an HTML element. Children are nodes or text, never markup: names come from files. */
  function html(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  const swatch = (method) =>
    svg("svg", { class: `swatch ${method.style}`, viewBox: "0 0 26 8", "aria-hidden": "true" },
      svg("line", { class: "line", x1: 1, x2: 25, y1: 4, y2: 4 }));

  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
  const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
  const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const percent = (share, digits = 2) => `${(100 * share).toFixed(digits)} %`;
  const lossText = (loss) => (loss >= 0.01 && loss < 1e4 ? loss.toPrecision(4) : loss.toExponential(2));
  const secondsText = (s) => (s < 60 ? `${s.toFixed(1)} s` : `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`);

  /** Round steps of 1, 2 or 5 times a power of ten, about `count` of them; whole numbers where asked. */
  function ticks(low, high, count, whole = false) {
    const rough = Math.max((high - low) / count || 1, whole ? 1 : 0);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.8) * power;
    const found = [];
    const end = high + step * 1e-9;
    for (let i = Math.ceil(low / step - 1e-9); i * step <= end; i++) found.push(i * step + 0); // + 0 makes -0 a 0
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const form = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    return found.map((value) => ({ value, text: value.toLocaleString("en", form) }));
  }

  /** Powers of ten, with 2 and 5 between them while there is room; plain ticks where the range is narrow. */
  function logTicks(low, high) {
    const factors = Math.log10(high / low) > 2.5 ? [1] : [1, 2, 5];
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const factor of factors) {
        const value = factor * 10 ** power;
        if (value >= low && value <= high) {
          const plain = power >= -3 && power < 4;
          const text = plain ? value.toLocaleString("en", { maximumSignificantDigits: 1 }) : value.toExponential(0);
          found.push({ value, text });
        }
      }
    }
    return found.length > 1 ? found : ticks(low, high, 4);
  }

  // What charts and heat maps share: a plot that is drawn to its width and shows values at places ("stops")

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

  // Line charts

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
        const kind = group.length > 1 ? "line faint" : "line";
        const names = { class: `${kind} ${method.style}`, "data-method": index, "data-seed": run.seed };
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

  function shownLabels() {
    return methods.filter((_, index) => !hidden.has(index)).map(({ label }) => label).join(", ") || "no method";
  }

  const curves = { measure: "accuracy", closeup: true, log: false };
  const drawCurves = interactive(document.querySelector("#curves .plot"), (width) => {
    const accuracy = curves.measure === "accuracy";
    const name = accuracy ? data.accuracy : "Training loss";
    return lineChart(width, {
      id: "curves", series: lines("epoch", curves.measure), shared: true,
      label: `${name} in each epoch: ${shownLabels()}.`,
      xLabel: "Epoch", yLabel: accuracy ? `${name}, %` : name,
      yScale: accuracy ? 100 : 1, yMost: accuracy ? 100 : Infinity, fromZero: !accuracy,
      yText: accuracy ? (y) => percent(y) : lossText,
      closeup: accuracy && curves.closeup, log: !accuracy && curves.log,
    });
  });

  const timing = { closeup: true };
  const drawTiming = interactive(document.querySelector("#timing .plot"), (width) => {
    const series = lines("elapsed", "accuracy").filter(({ run }) => run.timed);
    const hours = most(series.flatMap((s) => s.points.map((p) => p.x))) > 3 * 3600;
    const unit = hours ? 3600 : 1;
    for (const s of series) for (const p of s.points) p.x /= unit;
    return lineChart(width, {
      id: "timing", series, shared: false,
      label: `${data.accuracy} against training time: ${shownLabels()}.`,
      xLabel: `Training time, ${hours ? "hours" : "seconds"}`, yLabel: `${data.accuracy}, %`,
      yScale: 100, yMost: 100, yText: (y) => percent(y), xTitle: (x) => secondsText(x * unit), closeup: timing.closeup,
    });
  });

  // Heat maps

  const masked = methods.map((method, index) => ({ method, index })).filter(({ method }) => method.density);
  const shares = masked.flatMap(({ method }) => method.density.shares.flat().filter((share) => share !== null));
  // One scale for all, so that methods compare; no wider than it must be, so that layers differ.
  const low = clamp(Math.floor(least(shares) * 10 + 1e-9) / 10, 0, 0.9);
  const high = clamp(Math.ceil(most(shares) * 10 - 1e-9) / 10, low + 0.1, 1);

  /** Draw rows of layers and columns of epochs; where epochs would be narrower than 3 pixels, means of several. */
  function heatMap(width, method) {
    const { layers, epochs, shares: rows, seeds } = method.density;
    const longest = most(layers.map((layer) => layer.length));
    const left = Math.min(8 + 6.4 * longest, 0.34 * width);
    const letters = Math.floor((left - 8) / 6.4);
    const rowHeight = clamp(Math.round(240 / layers.length), 8, 20);
    const group = Math.max(1, Math.ceil(epochs.length / ((width - left) / 3)));
    const columns = [];
    for (let at = 0; at < epochs.length; at += group) columns.push([at, Math.min(at + group, epochs.length)]);
    const cell = (width - left) / columns.length;
    const bottom = layers.length * rowHeight;
    const height = bottom + 34;
    const root = svg("svg", {
      viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `Share of perturbed weights for ${method.label}, by layer and epoch.`,
    });
    const every = Math.ceil(12 / rowHeight); // names of neighbours must not touch
    const stops = [];
    layers.forEach((layer, row) => {
      const y = row * rowHeight;
      const short = layer.length > letters ? `${layer.slice(0, Math.max(1, letters - 1))}…` : layer;
      if (row % every === 0) {
        root.append(svg("text", { x: left - 8, y: y + rowHeight / 2 + 4, "text-anchor": "end" }, short));
      }
      columns.forEach(([from, to], column) => {
        const values = rows[row].slice(from, to).filter((share) => share !== null);
        const x = left + column * cell;
        const value = values.length ? mean(values) : null;
        if (value !== null) {
          const box = svg("rect", { class: "cell", x, y, width: cell, height: rowHeight - 1 });
          // A style attribute would be refused by the page's policy; this is not.
          box.style.setProperty("--share", ((value - low) / (high - low)).toFixed(3));
          root.append(box);
        }
        const span = to - from > 1 ? `Epochs ${epochs[from]} to ${epochs[to - 1]}` : `Epoch ${epochs[from]}`;
        stops.push({
          x: x + cell / 2, y: y + rowHeight / 2, title: layer,
          rows: [{
            method, name: seeds > 1 ? `${span}, mean of ${seeds} seeds` : span,
            text: value === null ? "–" : percent(value, 1),
          }],
          marks: () => [svg("rect", {
            class: "mark", x, y, width: cell, height: rowHeight - 1,
            "data-layer": layer, "data-epoch": epochs[from], "data-value": value,
          })],
        });
      });
    });
    const last = epochs.length - 1;
    const later = ticks(epochs[0], epochs[last], width < 460 ? 4 : 6, true).filter(({ value }) => value > epochs[0]);
    for (const { value, text } of [{ value: epochs[0], text: String(epochs[0]) }, ...later]) {
      const x = left + ((value - epochs[0] + 0.5) / (epochs[last] - epochs[0] + 1)) * (width - left);
      root.append(svg("text", { x: clamp(x, 0, width - 11), y: bottom + 14, "text-anchor": "middle" }, text));
    }
    root.append(svg("text", { x: width, y: height - 4, "text-anchor": "end" }, "Epoch"));
    const across = columns.length;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across };
    const move = (index, key) => {
      const next = index + steps[key];
      const sideways = key === "ArrowLeft" || key === "ArrowRight";
      if (sideways && Math.floor(next / across) !== Math.floor(index / across)) return index;
      return stops[next] ? next : index;
    };
    return { svg: root, stops, wide: false, move };
  }

  const maps = document.querySelector("#masks .maps");
  const drawMaps = masked.map(({ method, index }) => {
    const plot = html("div", { class: "plot" });
    const box = html("div", { "data-method": index }, html("h3", {}, swatch(method), method.label), plot);
    maps.append(box);
    const redraw = interactive(plot, (width) => heatMap(width, method));
    return () => {
      box.hidden = hidden.has(index);
      redraw();
    };
  });
  if (masked.length) {
    const [from, to] = document.querySelectorAll("#masks .scale span");
    from.textContent = percent(low, 0);
    to.textContent = percent(high, 0);
    document.getElementById("masks").hidden = false;
  }

  // Controls

  function drawAll() {
    drawCurves();
    drawTiming();
    drawMaps.forEach((draw) => draw());
  }

  function pressed(button, on) {
    button.setAttribute("aria-pressed", String(on));
  }

  const legend = document.getElementById("legend");
  methods.forEach((method, index) => {
    const button = html("button", { type: "button", "aria-pressed": "true", "data-method": index });
    button.append(swatch(method), html("span", {}, method.label));
    button.addEventListener("click", () => {
      hidden.has(index) ? hidden.delete(index) : hidden.add(index);
      pressed(button, !hidden.has(index));
      drawAll();
    });
    legend.append(button);
  });

  const measures = document.querySelectorAll("#curves [data-measure]");
  for (const button of measures) {
    button.addEventListener("click", () => {
      curves.measure = button.dataset.measure;
      for (const other of measures) pressed(other, other === button);
      document.querySelector("#curves [data-option=closeup]").hidden = curves.measure !== "accuracy";
      document.querySelector("#curves [data-option=log]").hidden = curves.measure !== "loss";
      drawCurves();
    });
  }

  for (const [id, state, draw] of [["curves", curves, drawCurves], ["timing", timing, drawTiming]]) {
    for (const button of document.querySelectorAll(`#${id} [data-option]`)) {
      button.addEventListener("click", () => {
        state[button.dataset.option] = !state[button.dataset.option];
        pressed(button, state[button.dataset.option]);
        draw();
      });
    }
  }

  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const nameTheme = () => (theme.textContent = dark() ? "Light theme" : "Dark theme");
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    nameTheme();
  });
  system.addEventListener("change", nameTheme);
  nameTheme();
  theme.hidden = false;

  document.getElementById("charts").hidden = false;
  drawAll();
})();
