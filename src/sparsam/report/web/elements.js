// What both pages use: elements, the legend, and the button that changes the theme

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
const pressed = (button, on) => button.setAttribute("aria-pressed", String(on));

/**
 * Fill #legend with a button for each method or run, which hides it and shows it again.
 *
 * @param kind What they are: the button has the index in data-{kind}.
 * @param items Each has a style and a label.
 * @param hidden The set of the indices of those that are hidden.
 * @param changed Called with the index, after each click.
 */
function legend(kind, items, hidden, changed) {
  items.forEach((item, index) => {
    const button = html("button", { type: "button", "aria-pressed": "true", [`data-${kind}`]: index });
    button.append(swatch(item), html("span", {}, item.label));
    button.addEventListener("click", () => {
      hidden.has(index) ? hidden.delete(index) : hidden.add(index);
      pressed(button, !hidden.has(index));
      changed(index);
    });
    document.getElementById("legend").append(button);
  });
}

/** Let the button #theme switch between light and dark. `changed` is called after each switch, and once at the start. */
function themeButton(changed) {
  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const update = () => {
    theme.textContent = dark() ? "Light theme" : "Dark theme";
    changed();
  };
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    update();
  });
  system.addEventListener("change", update);
  theme.hidden = false;
  update();
}
