// The report's page: its data, its three kinds of chart, its buttons

const data = JSON.parse(document.getElementById("report-data").textContent);
const methods = data.methods;
const hidden = new Set(); // indices of methods that the legend switched off

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

const masked = methods.map((method, index) => ({ method, index })).filter(({ method }) => method.density);
const shares = masked.flatMap(({ method }) => method.density.shares.flat().filter((share) => share !== null));
// One scale for all, so that methods compare; no wider than it must be, so that layers differ.
const low = clamp(Math.floor(least(shares) * 10 + 1e-9) / 10, 0, 0.9);
const high = clamp(Math.ceil(most(shares) * 10 - 1e-9) / 10, low + 0.1, 1);

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

function drawAll() {
  drawCurves();
  drawTiming();
  drawMaps.forEach((draw) => draw());
}

legend("method", methods, hidden, drawAll);

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

themeButton(() => {});
document.getElementById("charts").hidden = false;
drawAll();
