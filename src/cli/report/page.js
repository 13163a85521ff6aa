"use strict";
const tip = document.getElementById("tip");
const shape = document.querySelector("svg")?.namespaceURI;
const draw = (name, attributes, inside) => {
  const made = inside.appendChild(document.createElementNS(shape, name));
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  return made;
};
const shown = x => x === 0 ? "0" : Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6 ? x.toExponential(3) : String(+x.toPrecision(5));

function say(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4)) + "px";
  tip.style.top = (event.clientY + height + 24 > innerHeight ? event.clientY - height - 12 : event.clientY + 16) + "px";
}

// The numbers of a curve are those of its path.
const points = new WeakMap();
function pointsOf(curve) {
  if (!points.has(curve)) {
    const pairs = curve.getAttribute("d").matchAll(/(-?[\d.]+) (-?[\d.]+)/g);
    points.set(curve, Array.from(pairs, pair => [Number(pair[1]), Number(pair[2])]));
  }
  return points.get(curve);
}

function nearest(curve, x) {
  const all = pointsOf(curve);
  let low = 0, high = all.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (all[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - all[low - 1][0] < all[low][0] - x ? all[low - 1] : all[low];
}

for (const chart of document.querySelectorAll("svg.chart")) {
  const group = chart.querySelector("g"), curves = [...group.querySelectorAll(".curve")];
  const unit = chart.dataset.unit;
  let over = null;
  const leave = () => { over?.remove(); over = null; tip.hidden = true; };
  chart.addEventListener("pointerleave", leave);
  chart.addEventListener("pointermove", event => {
    if (!curves.length) return;
    leave();
    const { a, d, e, f } = group.transform.baseVal.getItem(0).matrix;
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
    const found = curves.map(curve => [curve, nearest(curve, (at.x - e) / a)]);
    const step = found.map(([, point]) => point[0]).reduce((x, y) => Math.abs(a * x + e - at.x) <= Math.abs(a * y + e - at.x) ? x : y);
    const there = found.filter(([, point]) => point[0] === step);
    over = draw("g", {}, chart);
    const box = chart.viewBox.baseVal;
    draw("path", { class: "hair", d: `M${a * step + e} 14V${box.height - 32}` }, over);
    for (const [curve, point] of there) {
      const run = [...curve.classList].find(name => /^r\d/.test(name));
      draw("circle", { class: "spot " + run, cx: a * point[0] + e, cy: d * point[1] + f, r: 3.5 }, over);
    }
    const rows = there.map(([curve, point]) => `${curve.dataset.name}: ${shown(point[1])} ${unit}`);
    say(event, [`step ${step}`, ...rows].join("\n"));
  });
}

// The words of a column are in its title, which no touch shows.
for (const columns of document.querySelectorAll("svg.columns")) {
  for (const title of columns.querySelectorAll("title")) {
    title.parentNode.dataset.words = title.textContent;
    title.remove();
  }
  columns.addEventListener("pointermove", event => {
    const words = event.target.dataset.words;
    if (words) say(event, words); else tip.hidden = true;
  });
  columns.addEventListener("pointerleave", () => { tip.hidden = true; });
}

const controls = document.getElementById("controls");
if (controls) {
  const steps = [...document.querySelectorAll(".step")], select = document.getElementById("step");
  const names = { a: "advantage", l: "log-prob", k: "KL" };
  const numbers = (text, name) => text.dataset[name].split(" ").map(Number);

  // Cuts a response into its tokens, once.
  const cut = text => {
    if (text.tokens) return text.tokens;
    const whole = text.textContent, lengths = numbers(text, "cuts"), env = text.dataset.env?.split(" ") ?? [];
    let at = 0;
    text.textContent = "";
    text.tokens = lengths.map((length, i) => {
      const span = document.createElement("span");
      span.env = env[i] === "1" ? " env" : "";
      span.textContent = whole.slice(at, at += length);
      text.append(span);
      return span;
    });
    text.values = {};
    for (const name in names) text.values[name] = numbers(text, name);
    text.classList.add("cut");
    text.addEventListener("pointermove", event => {
      const i = text.tokens.indexOf(event.target);
      if (i < 0) { tip.hidden = true; return; }
      const of = name => Number.isFinite(text.values[name][i]) ? shown(text.values[name][i]) : "none";
      const rows = Object.entries(names).map(([name, words]) => `${words} ${of(name)}`);
      if (event.target.env) rows.unshift("environment");
      say(event, [JSON.stringify(event.target.textContent), ...rows].join("\n"));
    });
    text.addEventListener("pointerleave", () => { tip.hidden = true; });
    return text.tokens;
  };

  const show = () => {
    const by = controls.querySelector("input:checked").value;
    const step = steps[select.selectedIndex];
    steps.forEach(other => { other.hidden = other !== step; });
    const texts = [...step.querySelectorAll("bdi[data-cuts]")];
    texts.forEach(cut);
    const sizes = by ? texts.flatMap(text => text.values[by]).filter(Number.isFinite).map(Math.abs).sort((x, y) => x - y) : [];
    const most = sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1 : 1;
    for (const text of texts) {
      text.tokens.forEach((span, i) => {
        const value = by ? text.values[by][i] : NaN;
        span.className = (value > 0 ? "p" : value < 0 ? "n" : "") + span.env;
        span.style.setProperty("--a", (0.6 * Math.min(1, Math.abs(value) / most)).toFixed(2));
      });
    }
    document.getElementById("scale").hidden = !by;
    document.getElementById("low").textContent = "−" + shown(+most.toPrecision(3));
    document.getElementById("high").textContent = shown(+most.toPrecision(3));
  };

  for (const step of steps) {
    select.append(new Option(step.querySelector("h3").textContent));
  }
  select.selectedIndex = steps.length - 1;
  controls.addEventListener("change", show);
  controls.addEventListener("submit", event => event.preventDefault());
  controls.hidden = false;
  if (steps.some(step => step.querySelector("bdi[data-cuts]")) === false) controls.querySelector("fieldset").hidden = true;
  show();
}
