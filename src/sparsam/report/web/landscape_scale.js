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

function dot(c, x, y, radius) {
  c.beginPath();
  c.arc(x, y, radius, 0, 2 * Math.PI);
  c.fillStyle = "#ffffff";
  c.strokeStyle = "#1d2229";
  c.lineWidth = 1.2;
  c.fill();
  c.stroke();
}
