"use strict";

(() => {
  const data = JSON.parse(document.getElementById("landscape-data").textContent);
  const { axis, runs } = data;
  const n = axis.length;
  const span = axis[n - 1];
  const plane = runs[0].losses.length > n;
  const hidden = new Set(); // indices of runs that the legend switched off
  const start = { azimuth: data.azimuth, elevation: 36 };
  const view = { ...start, log: data.log };
  let chosen = -1; // the grid point that is read: row * n + column

  // Small tools

  /** Make an HTML element. Children are nodes or text, never markup: names come from files. */
  function html(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  function svg(name, attributes = {}, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  const swatch = (run) =>
    svg("svg", { class: `swatch ${run.style}`, viewBox: "0 0 26 8", "aria-hidden": "true" },
      svg("line", { class: "line", x1: 1, x2: 25, y1: 4, y2: 4 }));

  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
  const number = (value) => String(+value.toPrecision(3)).replace("-", "−");
  const colourOf = (id) => getComputedStyle(document.getElementById(id)).color;

  function lossText(loss) {
    if (loss === null) return "no finite loss";
    return Math.abs(loss) >= 0.01 && Math.abs(loss) < 1e4 ? loss.toPrecision(4) : loss.toExponential(2);
  }

  // One scale for all runs: losses become heights, 0 at the lowest and 1 at the highest

  const all = runs.flatMap((run) => [...run.losses, run.centre]).filter((loss) => loss !== null);
  const lowest = all.reduce((a, b) => Math.min(a, b));
  const highest = all.reduce((a, b) => Math.max(a, b));

  function height(loss) {
    if (loss === null) return NaN;
    if (highest === lowest) return 0.5;
    return view.log ? Math.log(loss / lowest) / Math.log(highest / lowest) : (loss - lowest) / (highest - lowest);
  }

  /** Round losses within the scale, at most about `count` of them. */
  function ticks(count) {
    if (!view.log) {
      const rough = (highest - lowest) / count || 1;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
      const found = [];
      for (let i = Math.ceil(lowest / step - 1e-9); i * step <= highest * (1 + 1e-9); i++) found.push(i * step);
      return found;
    }
    let found = [];
    for (const factors of [[1, 2, 5], [1, 3], [1]]) {
      found = [];
      for (let power = Math.floor(Math.log10(lowest)); power <= Math.log10(highest); power++) {
        for (const factor of factors) {
          const value = factor * 10 ** power;
          if (value >= lowest && value <= highest) found.push(value);
        }
      }
      if (found.length <= count + 2) break;
    }
    return found;
  }

  const stops = data.colours.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));

  function colour(h) {
    const place = clamp(h, 0, 1) * (stops.length - 1);
    const i = Math.min(Math.floor(place), stops.length - 2);
    return stops[i].map((c, k) => c + (place - i) * (stops[i + 1][k] - c));
  }

  /** Fit a canvas to a size in the page and to the screen's pixels. */
  function context(canvas, width, tall) {
    const dense = window.devicePixelRatio || 1;
    canvas.width = width * dense;
    canvas.height = tall * dense;
    canvas.style.height = `${tall}px`;
    const c = canvas.getContext("2d");
    c.setTransform(dense, 0, 0, dense, 0, 0);
    c.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
    return c;
  }

  // What the mouse, a finger and the keyboard point at, in all panels at once

  const panels = []; // {draw, show}: draw everything; move the mark

  function choose(index, aloud = false) {
    if (index === chosen) return;
    chosen = index;
    for (const panel of panels) panel.show();
    if (aloud && index >= 0) {
      const shown = runs.filter((_, i) => !hidden.has(i));
      const said = shown.map((run) => `${run.label} ${lossText(run.losses[index])}`);
      document.getElementById("spoken").textContent = [placeText(index), ...said].join(", ");
    }
  }

  function placeText(index) {
    const a = `a = ${number(axis[index % n])}`;
    return plane ? `${a}, b = ${number(axis[Math.floor(index / n)])}` : a;
  }

  /** Fill the box of values and put it beside a place, on the side that has room. */
  function showTip(tip, x, y) {
    tip.hidden = chosen < 0;
    if (chosen < 0) return;
    const rows = runs.filter((_, i) => !hidden.has(i)).map((run) =>
      html("li", {}, swatch(run), html("span", {}, run.label), html("b", {}, lossText(run.losses[chosen]))));
    tip.replaceChildren(html("p", {}, placeText(chosen)), html("ul", {}, ...rows));
    const { clientWidth: width, clientHeight: tall } = tip.parentElement;
    const left = x + 16 + tip.offsetWidth <= width ? x + 16 : Math.max(0, x - 16 - tip.offsetWidth);
    const top = clamp(y - tip.offsetHeight / 2, 0, Math.max(0, tall - tip.offsetHeight));
    tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }

  /** Let arrow keys lead from one grid point to the next. */
  function moved(key) {
    if (chosen < 0) return plane ? Math.floor(n / 2) * n + Math.floor(n / 2) : Math.floor(n / 2);
    const column = clamp((chosen % n) + ({ ArrowRight: 1, ArrowLeft: -1 }[key] ?? 0), 0, n - 1);
    const row = plane ? clamp(Math.floor(chosen / n) + ({ ArrowUp: 1, ArrowDown: -1 }[key] ?? 0), 0, n - 1) : 0;
    return row * n + column;
  }

  // Surfaces

  const TALL = 1.3; // the height of the box; its floor goes from -1 to 1

  /** Return how points of the box appear: to the right, upward, and toward the viewer. */
  function camera() {
    const [phi, theta] = [view.azimuth, view.elevation].map((degrees) => (degrees * Math.PI) / 180);
    const [c, s, ce, se] = [Math.cos(phi), Math.sin(phi), Math.cos(theta), Math.sin(theta)];
    return {
      fromX: c > 0, fromY: s > 0,
      project: (x, y, h) => {
        const z = (h - 0.5) * TALL;
        return [c * y - s * x, z * ce - se * (c * x + s * y), ce * (c * x + s * y) + se * z];
      },
    };
  }

  /** The colour of each cell, lit from one side so that slopes can be seen. It turns with the surface. */
  function litColours(heights) {
    const light = [-0.36, -0.48, 0.8];
    const cells = new Array((n - 1) * (n - 1));
    for (let row = 0; row < n - 1; row++) {
      for (let column = 0; column < n - 1; column++) {
        const at = row * n + column;
        const corners = [heights[at], heights[at + 1], heights[at + n], heights[at + n + 1]];
        const mean = (corners[0] + corners[1] + corners[2] + corners[3]) / 4;
        if (Number.isNaN(mean)) continue;
        const along = (d) => ((d / 2) * TALL * (n - 1)) / 2;
        const slopes = [
          along(corners[1] + corners[3] - corners[0] - corners[2]),
          along(corners[2] + corners[3] - corners[0] - corners[1]),
        ];
        const facing = (light[2] - light[0] * slopes[0] - light[1] * slopes[1]) / Math.hypot(1, ...slopes);
        cells[row * (n - 1) + column] = colour(mean).map((v) => clamp(v * (0.78 + 0.25 * facing), 0, 255));
      }
    }
    return cells;
  }

  function surface(run, plot) {
    const canvas = plot.appendChild(html("canvas", { role: "img", "aria-label": `${run.label}: loss as a surface` }));
    const tip = plot.appendChild(html("div", { class: "tip", hidden: "" }));
    let heights, cells, points, frame;
    let held = null;

    /** Draw the floor, the two walls behind the surface, and the scale. */
    function drawBox(c, at, { project, fromX, fromY }) {
      const back = [fromX ? -1 : 1, fromY ? -1 : 1]; // the corner farthest from the viewer
      const line = (...ends) => {
        c.beginPath();
        ends.forEach((end, i) => (i ? c.lineTo(...at(project(...end))) : c.moveTo(...at(project(...end)))));
        c.stroke();
      };
      c.strokeStyle = colourOf("rule");
      c.fillStyle = colourOf("quiet");
      c.lineWidth = 1;
      for (const t of [-1, -0.5, 0, 0.5, 1]) {
        line([t, -1, 0], [t, 1, 0]);
        line([-1, t, 0], [1, t, 0]);
      }
      line([...back, 0], [...back, 1]);
      // The upright edge at the left carries the numbers.
      const sides = [[back[0], -back[1]], [-back[0], back[1]]];
      const left = project(...sides[0], 0)[0] < project(...sides[1], 0)[0] ? sides[0] : sides[1];
      const right = left === sides[0] ? sides[1] : sides[0];
      for (const side of sides) line([...side, 0], [...side, 1]);
      c.textAlign = "right";
      c.textBaseline = "middle";
      for (const tick of ticks(5)) {
        const h = height(tick);
        line([...left, h], [...back, h], [...right, h]);
        const [x, y] = at(project(...left, h));
        c.fillText(number(tick), x - 5, y);
      }
      c.textAlign = "center";
      const name = (text, x, y) => c.fillText(text, ...at(project(x, y, 0)).map((v, k) => v + (k ? 9 : 0)));
      for (const t of [-0.5, 0, 0.5]) {
        name(number(t * span), t, -back[1] * 1.1);
        name(number(t * span), -back[0] * 1.1, t);
      }
      name("a", 0.25, -back[1] * 1.22);
      name("b", -back[0] * 1.22, 0.25);
    }

    function draw() {
      const [width, tall] = [plot.clientWidth, Math.round(0.94 * plot.clientWidth)];
      const c = context(canvas, width, tall);
      const size = Math.min(width / 3, tall / 2.85);
      const eye = camera();
      const at = ([x, y]) => [width / 2 + 10 + x * size, tall / 2 - 2 - y * size];
      c.clearRect(0, 0, width, tall);
      drawBox(c, at, eye);
      points = heights.map((h, i) => {
        const p = eye.project(axis[i % n] / span, axis[Math.floor(i / n)] / span, h);
        return [...at(p), p[2]];
      });
      // Cells from the farthest to the nearest: for heights over a plane that is the order of their rows and columns.
      c.lineJoin = "round";
      c.lineWidth = 0.7;
      for (let i = 0; i < n - 1; i++) {
        const row = eye.fromY ? i : n - 2 - i;
        for (let k = 0; k < n - 1; k++) {
          const column = eye.fromX ? k : n - 2 - k;
          const cell = cells[row * (n - 1) + column];
          if (!cell) continue;
          const first = row * n + column;
          const [p, q, r, s] = [first, first + 1, first + n + 1, first + n].map((i) => points[i]);
          const below = (r[0] - p[0]) * (s[1] - q[1]) - (r[1] - p[1]) * (s[0] - q[0]) > 0;
          const dim = below ? 0.8 : 1; // the underside lies in the shade
          c.fillStyle = c.strokeStyle = `rgb(${cell.map((v) => Math.round(v * dim)).join(" ")})`;
          c.beginPath();
          c.moveTo(p[0], p[1]);
          c.lineTo(q[0], q[1]);
          c.lineTo(r[0], r[1]);
          c.lineTo(s[0], s[1]);
          c.closePath();
          c.fill();
          c.stroke(); // against hairlines between neighbours
        }
      }
      if (chosen >= 0 && run.losses[chosen] !== null) {
        const x = axis[chosen % n] / span, y = axis[Math.floor(chosen / n)] / span;
        const [px, py] = points[chosen];
        c.strokeStyle = c.fillStyle = colourOf("ink");
        c.setLineDash([2, 3]);
        c.lineWidth = 1;
        c.beginPath();
        c.moveTo(...at(eye.project(x, y, 0)));
        c.lineTo(px, py);
        c.stroke();
        c.setLineDash([]);
        dot(c, px, py, 4.5);
      }
      frame = 0;
    }

    const later = () => (frame ||= requestAnimationFrame(draw));

    /** The grid point under the mouse: of those close by, the one nearest to the viewer. */
    function under(x, y) {
      let best = -1, nearest = -Infinity;
      points.forEach(([px, py, depth], i) => {
        if (Math.hypot(px - x, py - y) < 8 && depth > nearest) [best, nearest] = [i, depth];
      });
      return best;
    }

    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.clientX, y: event.clientY, azimuth: view.azimuth, elevation: view.elevation };
      canvas.setPointerCapture(event.pointerId);
      plot.classList.add("turning");
    });
    canvas.addEventListener("pointermove", (event) => {
      if (held) {
        choose(-1);
        view.azimuth = held.azimuth - (event.clientX - held.x) * 0.5;
        view.elevation = clamp(held.elevation + (event.clientY - held.y) * 0.4, 4, 89);
        for (const panel of panels) panel.turn?.();
        return;
      }
      const box = canvas.getBoundingClientRect();
      choose(under(event.clientX - box.left, event.clientY - box.top));
      showTip(tip, event.clientX - box.left, event.clientY - box.top);
    });
    const release = () => {
      held = null;
      plot.classList.remove("turning");
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => {
      choose(-1);
      tip.hidden = true;
    });
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", `${run.label}: the loss as a surface. Arrow keys turn it.`);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-5, 0], ArrowRight: [5, 0], ArrowUp: [0, 4], ArrowDown: [0, -4] }[event.key];
      if (!step) return;
      event.preventDefault();
      view.azimuth += step[0];
      view.elevation = clamp(view.elevation + step[1], 4, 89);
      for (const panel of panels) panel.turn?.();
    });
    return {
      draw: () => {
        heights = run.losses.map(height);
        cells = litColours(heights);
        draw();
      },
      turn: later,
      show: () => {
        if (chosen < 0) tip.hidden = true;
        later();
      },
    };
  }

  function dot(c, x, y, radius) {
    c.beginPath();
    c.arc(x, y, radius, 0, 2 * Math.PI);
    c.fillStyle = "#ffffff";
    c.strokeStyle = "#1d2229";
    c.lineWidth = 1.2;
    c.fill();
    c.stroke();
  }

  // Maps: the same losses from above, with lines of equal loss

  /** The lines at one height, cell by cell: where they cross the cell's sides. */
  function isolines(heights, level, draw) {
    const crossing = (i, k) => (level - heights[i]) / (heights[k] - heights[i]);
    for (let row = 0; row < n - 1; row++) {
      for (let column = 0; column < n - 1; column++) {
        const at = row * n + column;
        const [p, q, r, s] = [at, at + 1, at + n + 1, at + n];
        const found = [];
        for (const [i, k] of [[p, q], [q, r], [r, s], [s, p]]) {
          if (heights[i] < level === heights[k] < level || Number.isNaN(heights[i] + heights[k])) continue;
          const t = crossing(i, k);
          const [xi, yi, xk, yk] = [i % n, Math.floor(i / n), k % n, Math.floor(k / n)];
          found.push([xi + t * (xk - xi), yi + t * (yk - yi)]);
        }
        for (let i = 0; i + 1 < found.length; i += 2) draw(found[i], found[i + 1]);
      }
    }
  }

  function map(run, plot) {
    const canvas = plot.appendChild(html("canvas", { role: "img", "aria-label": `${run.label}: loss as a map` }));
    const tip = plot.appendChild(html("div", { class: "tip", hidden: "" }));
    let painted, box, frame;

    /** Paint each pixel by the height between the four grid points around it. */
    function paint(heights, pixels) {
      const image = new ImageData(pixels, pixels);
      for (let y = 0; y < pixels; y++) {
        const v = (1 - y / (pixels - 1)) * (n - 1);
        const row = Math.min(Math.floor(v), n - 2);
        for (let x = 0; x < pixels; x++) {
          const u = (x / (pixels - 1)) * (n - 1);
          const column = Math.min(Math.floor(u), n - 2);
          const at = row * n + column;
          const [s, t] = [u - column, v - row];
          const h = (1 - t) * ((1 - s) * heights[at] + s * heights[at + 1])
            + t * ((1 - s) * heights[at + n] + s * heights[at + n + 1]);
          if (Number.isNaN(h)) continue;
          image.data.set(colour(h), 4 * (y * pixels + x));
          image.data[4 * (y * pixels + x) + 3] = 255;
        }
      }
      const sheet = html("canvas", { width: pixels, height: pixels });
      sheet.getContext("2d").putImageData(image, 0, 0);
      return sheet;
    }

    function prepare() {
      const [width, tall] = [plot.clientWidth, Math.round(0.98 * plot.clientWidth)];
      const c = context(canvas, width, tall);
      const side = Math.min(width - 40, tall - 30);
      box = { left: 30 + (width - 40 - side) / 2, top: 6, side, c, width, tall };
      const heights = run.losses.map(height);
      const at = ([x, y]) => [box.left + (x / (n - 1)) * side, box.top + side - (y / (n - 1)) * side];
      painted = html("canvas");
      const p = context(painted, width, tall);
      p.fillStyle = colourOf("gap");
      p.fillRect(box.left, box.top, side, side);
      p.drawImage(paint(heights, Math.round(side * (window.devicePixelRatio || 1))), box.left, box.top, side, side);
      const strong = new Set(ticks(4));
      for (const tick of new Set([...ticks(12), ...strong])) {
        const level = height(tick);
        // White is not seen on the light end of the colours, nor ink on the dark one.
        p.strokeStyle = level < 0.5 ? "rgb(255 255 255 / 0.7)" : "rgb(29 34 41 / 0.6)";
        p.lineWidth = strong.has(tick) ? 1.3 : 0.6;
        p.beginPath();
        isolines(heights, level, (from, to) => {
          p.moveTo(...at(from));
          p.lineTo(...at(to));
        });
        p.stroke();
      }
      const place = (v) => ((v / span + 1) / 2) * (n - 1);
      if (run.path.length) {
        p.strokeStyle = "#ffffff";
        p.lineWidth = 1;
        p.beginPath();
        run.path.forEach(([a, b], i) => p[i ? "lineTo" : "moveTo"](...at([place(a), place(b)])));
        p.stroke();
        for (const [a, b] of run.path) dot(p, ...at([place(a), place(b)]), 2.2);
      }
      dot(p, ...at([place(0), place(0)]), 4);
      p.fillStyle = colourOf("quiet");
      p.textAlign = "center";
      for (const t of [-1, 0, 1]) p.fillText(number(t * span), at([place(t * span), 0])[0], box.top + side + 16);
      p.fillText("a", at([place(span / 2), 0])[0], box.top + side + 16);
      p.textAlign = "right";
      p.textBaseline = "middle";
      for (const t of [-1, 0, 1]) {
        const y = clamp(at([0, place(t * span)])[1], box.top + 6, box.top + side - 5);
        p.fillText(number(t * span), box.left - 7, y);
      }
      p.fillText("b", box.left - 7, at([0, place(span / 2)])[1]);
      draw();
    }

    function draw() {
      const { c, left, top, side, width, tall } = box;
      c.clearRect(0, 0, width, tall);
      c.drawImage(painted, 0, 0, width, tall);
      if (chosen >= 0) {
        const x = left + ((chosen % n) / (n - 1)) * side;
        const y = top + side - (Math.floor(chosen / n) / (n - 1)) * side;
        c.strokeStyle = "rgb(255 255 255 / 0.55)";
        c.lineWidth = 1;
        c.beginPath();
        c.moveTo(left, y);
        c.lineTo(left + side, y);
        c.moveTo(x, top);
        c.lineTo(x, top + side);
        c.stroke();
        dot(c, x, y, 4.5);
      }
      frame = 0;
    }

    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", `${run.label}: the loss as a map. Arrow keys show values.`);
    const point = (event) => {
      const { left: x, top: y } = canvas.getBoundingClientRect();
      const column = Math.round(((event.clientX - x - box.left) / box.side) * (n - 1));
      const row = Math.round(((box.top + box.side - (event.clientY - y)) / box.side) * (n - 1));
      const inside = column >= 0 && column < n && row >= 0 && row < n;
      choose(inside ? row * n + column : -1);
      showTip(tip, event.clientX - x, event.clientY - y);
    };
    canvas.addEventListener("pointermove", point);
    canvas.addEventListener("pointerdown", point);
    canvas.addEventListener("pointerleave", () => {
      choose(-1);
      tip.hidden = true;
    });
    plot.addEventListener("blur", () => choose(-1));
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") choose(-1);
      if (!event.key.startsWith("Arrow")) return;
      event.preventDefault();
      choose(moved(event.key), true);
      const [column, row] = [chosen % n, Math.floor(chosen / n)].map((v) => v / (n - 1));
      showTip(tip, box.left + column * box.side, box.top + (1 - row) * box.side);
    });
    return {
      draw: prepare,
      show: () => {
        if (chosen < 0) tip.hidden = true;
        frame ||= requestAnimationFrame(draw);
      },
    };
  }

  // Lines: the losses along one direction

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

  // The page

  function drawScale() {
    const canvas = document.querySelector("#scale canvas");
    const width = canvas.clientWidth;
    const c = context(canvas, width, 34);
    const [left, right] = [12, width - 14];
    for (let x = left; x < right; x++) {
      c.fillStyle = `rgb(${colour((x - left) / (right - left)).map(Math.round).join(" ")})`;
      c.fillRect(x, 0, 1.5, 12);
    }
    c.fillStyle = colourOf("quiet");
    c.textAlign = "center";
    for (const tick of ticks(7)) c.fillText(number(tick), left + height(tick) * (right - left), 28);
  }

  let drawn = 0; // the width that is drawn for

  function drawAll() {
    drawn = holder.clientWidth;
    if (!drawn) return; // not laid out
    if (plane) drawScale();
    for (const panel of panels) if (!panel.box.hidden) panel.draw();
  }

  const holder = document.getElementById("panels");
  if (plane) {
    runs.forEach((run, index) => {
      const [above, below] = [html("div", { class: "plot surface" }), html("div", { class: "plot map" })];
      const words = html("figcaption", {}, html("h2", {}, swatch(run), run.label), html("p", {}, run.numbers));
      const box = html("figure", { class: "card", "data-run": index }, words, above, below);
      holder.append(box);
      for (const panel of [surface(run, above), map(run, below)]) {
        const shown = (act) => (...given) => box.hidden || act(...given);
        panels.push({ box, draw: panel.draw, show: shown(panel.show), turn: panel.turn && shown(panel.turn) });
      }
    });
  } else {
    const plot = html("div", { class: "plot" });
    const box = html("figure", { class: "card line-chart" }, plot);
    holder.append(box);
    panels.push({ box, ...lineChart(plot) });
  }

  const pressed = (button, on) => button.setAttribute("aria-pressed", String(on));
  const legend = document.getElementById("legend");
  runs.forEach((run, index) => {
    const button = html("button", { type: "button", "aria-pressed": "true", "data-run": index });
    button.append(swatch(run), html("span", {}, run.label));
    button.addEventListener("click", () => {
      hidden.has(index) ? hidden.delete(index) : hidden.add(index);
      pressed(button, !hidden.has(index));
      const box = holder.querySelector(`[data-run="${index}"].card`);
      if (box) box.hidden = hidden.has(index);
      drawAll();
    });
    legend.append(button);
  });

  const log = document.getElementById("log");
  log.hidden = !data.positive;
  pressed(log, view.log);
  log.addEventListener("click", () => {
    view.log = !view.log;
    pressed(log, view.log);
    drawAll();
  });
  const reset = document.getElementById("reset");
  reset.hidden = !plane;
  reset.addEventListener("click", () => {
    Object.assign(view, start);
    drawAll();
  });

  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const nameTheme = () => {
    theme.textContent = dark() ? "Light theme" : "Dark theme";
    drawAll();
  };
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    nameTheme();
  });
  system.addEventListener("change", nameTheme);
  theme.hidden = false;
  document.getElementById("bar").hidden = false;
  document.getElementById("scale").hidden = !plane;
  new ResizeObserver(() => holder.clientWidth !== drawn && drawAll()).observe(holder);
  nameTheme();
})();
