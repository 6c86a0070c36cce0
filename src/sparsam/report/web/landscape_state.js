// What the landscape page shows, and the grid point that is read in all panels at once

const data = JSON.parse(document.getElementById("landscape-data").textContent);
const { axis, runs } = data;
const n = axis.length;
const span = axis[n - 1];
const plane = runs[0].losses.length > n;
const hidden = new Set(); // indices of runs that the legend switched off
const start = { azimuth: data.azimuth, elevation: 36 };
const view = { ...start, log: data.log };
let chosen = -1; // the grid point that is read: row * n + column
const panels = []; // {draw, show}: draw everything; move the mark

const number = (value) => String(+value.toPrecision(3)).replace("-", "−");
const colourOf = (id) => getComputedStyle(document.getElementById(id)).color;

function lossText(loss) {
  if (loss === null) return "no finite loss";
  return Math.abs(loss) >= 0.01 && Math.abs(loss) < 1e4 ? loss.toPrecision(4) : loss.toExponential(2);
}

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
