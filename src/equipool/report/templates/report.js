"use strict";
(() => {
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
  const tables = {};
  const table = (key) => tables[key] ??= JSON.parse(document.getElementById("data-" + key).textContent);

  // Theme: as the system has it, until the button is pressed.
  const theme = document.getElementById("theme");
  const dark = () => (document.documentElement.dataset.theme
    ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    label();
  });
  theme.hidden = false;
  label();

  // Values on hover, by arrow keys and by touch.
  const tip = document.createElement("div");
  tip.id = "tip"; tip.hidden = true; tip.setAttribute("role", "status");
  document.body.append(tip);
  const words = (value) => typeof value !== "number" ? String(value)
    : (Math.abs(value) >= 1e-3 || value === 0 ? String(+value.toPrecision(4)) : value.toExponential(1)).replace("-", "−");
  const show = (lines, x, y) => {
    tip.replaceChildren(...lines.flatMap(([name, value], k) => {
      const strong = document.createElement("b");
      strong.textContent = words(value);
      return [...(k ? [document.createElement("br")] : []), `${name}: `, strong];
    }));
    tip.hidden = false;
    const width = document.documentElement.clientWidth;
    const left = Math.max(4, Math.min(x + 14, width - tip.offsetWidth - 4));
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${y + 16 + scrollY}px`;
  };
  const rowLines = (columns, row) => Object.entries(columns)
    .filter(([name, values]) => values[row] !== null && values[row] !== undefined && !["x", "y", "drawing"].includes(name))
    .map(([name, values]) => [name, values[row]]);
  for (const svg of all("svg[data-hits]")) {
    const key = svg.closest("figure").id;
    const hits = svg.dataset.hits.split(";").map((hit) => hit.split(",").map(Number));
    const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    ring.setAttribute("class", "ring"); ring.setAttribute("r", 6);
    let current = -1;
    const choose = (k) => {
      current = k;
      const [x, y, row] = hits[k];
      ring.setAttribute("cx", x); ring.setAttribute("cy", y);
      svg.append(ring);
      const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
      show(rowLines(table(key), row), box.left + x * scale, box.top + y * scale);
    };
    const leave = () => { ring.remove(); tip.hidden = true; };
    const seek = (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
      const across = svg.dataset.by === "y" ? 0.001 : 1;
      let best = -1, least = 22 * 22;
      hits.forEach(([hx, hy], k) => {
        const distance = across * (hx - x) ** 2 + (hy - y) ** 2;
        if (distance < least) { least = distance; best = k; }
      });
      if (best < 0) leave(); else choose(best);
    };
    svg.addEventListener("pointermove", seek);
    svg.addEventListener("pointerdown", seek);
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") leave();
      if (!step) return;
      event.preventDefault();
      choose((current + step + hits.length) % hits.length);
    });
  }

  // Numbers as CSV. A text that a spreadsheet would take for a formula gets an apostrophe.
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : value;
    return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  const csv = (columns) => {
    const names = Object.keys(columns), lines = [names.map(cell).join(",")];
    for (let row = 0; row < columns[names[0]].length; row++) lines.push(names.map((name) => cell(columns[name][row])).join(","));
    return lines.join("\r\n") + "\r\n";
  };
  for (const button of all("button.csv")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([csv(table(button.dataset.key))], { type: "text/csv" }));
      link.download = `${button.dataset.key}.csv`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }

  // One of several drawings.
  for (const picker of all(".picker select")) {
    const options = all("[data-option]", picker.closest("figure"));
    const pick = () => options.forEach((option, k) => { option.hidden = k !== picker.selectedIndex; });
    picker.closest(".picker").hidden = false;
    picker.addEventListener("change", pick);
    pick();
  }
  // Printed, all of them are there.
  const reveal = (shown) => all(".picker select").forEach((picker) => {
    if (shown) all("[data-option]", picker.closest("figure")).forEach((option) => { option.hidden = false; });
    else picker.dispatchEvent(new Event("change"));
  });
  addEventListener("beforeprint", () => reveal(true));
  addEventListener("afterprint", () => reveal(false));

  // One site, in all drawings.
  for (const button of all(".legend button")) button.addEventListener("click", () => {
    const key = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.site;
    document.body.classList.toggle("only", key !== null);
    all("[data-k]").forEach((group) => group.classList.toggle("chosen", group.dataset.k === key));
    all(".legend button").forEach((other) => other.setAttribute("aria-pressed", String(other.dataset.site === key)));
  });

  // Brain slices: red holds the brain, green and blue the t before and after.
  const viewer = document.getElementById("viewer");
  if (viewer) brains(viewer);
  function brains(root) {
    const about = JSON.parse(document.getElementById("viewer-data").textContent);
    const image = new Image();
    image.onload = () => {
      const sheet = document.createElement("canvas");
      sheet.width = image.width; sheet.height = image.height;
      const context = sheet.getContext("2d", { willReadFrequently: true });
      context.drawImage(image, 0, 0);
      const [slice, least] = ["slice", "least"].map((name) => document.getElementById(name));
      const stops = about.shades.map((hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)));
      const colour = (t) => {
        const half = t < 0 ? stops.slice(0, 3).reverse() : stops.slice(3);
        const at = Math.min(Math.abs(t) / about.top, 1) * 2, k = Math.min(Math.floor(at), 1);
        return half[k].map((value, c) => value + (half[k + 1][c] - value) * (at - k));
      };
      const read = () => {
        const k = +slice.value, column = k % about.columns, row = Math.floor(k / about.columns);
        return context.getImageData(column * about.width, row * about.height, about.width, about.height).data;
      };
      const draw = () => {
        const data = read();
        document.getElementById("slice-out").textContent = `${about.heights[+slice.value]} mm`;
        document.getElementById("least-out").textContent = (+least.value).toFixed(1);
        all("canvas", root).forEach((canvas, which) => {
          const target = canvas.getContext("2d"), out = target.createImageData(about.width, about.height);
          for (let p = 0; p < data.length; p += 4) {
            const t = (data[p + 1 + which] - 128) * about.step;
            if (data[p] === 0) continue;
            const rgb = Math.abs(t) >= Math.max(+least.value, about.step) ? colour(t) : [data[p], data[p], data[p]];
            out.data.set([...rgb, 255], p);
          }
          target.putImageData(out, 0, 0);
        });
      };
      all("canvas", root).forEach((canvas, which) => {
        const seek = (event) => {
          const box = canvas.getBoundingClientRect();
          const x = Math.floor((event.clientX - box.left) / box.width * about.width);
          const y = Math.floor((event.clientY - box.top) / box.height * about.height);
          const p = 4 * (y * about.width + x), data = read();
          if (!data[p]) { tip.hidden = true; return; }
          const t = (k) => +((data[p + 1 + k] - 128) * about.step).toFixed(1);
          show([["x", `${(about.x[0] + x * about.x[1]).toFixed(0)} mm`], ["y", `${(about.y[0] + y * about.y[1]).toFixed(0)} mm`],
            ["t, as measured", t(0)], ["t, harmonized", t(1)]], event.clientX, event.clientY);
        };
        canvas.addEventListener("pointermove", seek);
        canvas.addEventListener("pointerdown", seek);
        canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
      });
      slice.addEventListener("input", draw);
      least.addEventListener("input", draw);
      root.hidden = false;
      draw();
    };
    image.src = about.sheet;
  }
})();
