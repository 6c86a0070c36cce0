// Numbers as texts, and round numbers on axes

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
