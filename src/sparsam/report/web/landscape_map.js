// The same losses from above, with lines of equal loss

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
