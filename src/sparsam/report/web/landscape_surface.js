// Losses over a plane as a surface, to be turned

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
