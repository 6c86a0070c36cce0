// The landscape page: its panels and its buttons

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
legend("run", runs, hidden, (index) => {
  const box = holder.querySelector(`[data-run="${index}"].card`);
  if (box) box.hidden = hidden.has(index);
  drawAll();
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

document.getElementById("bar").hidden = false;
document.getElementById("scale").hidden = !plane;
new ResizeObserver(() => holder.clientWidth !== drawn && drawAll()).observe(holder);
themeButton(drawAll);
