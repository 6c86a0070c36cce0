// Heat maps: the share of perturbed weights, by layer and epoch

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
