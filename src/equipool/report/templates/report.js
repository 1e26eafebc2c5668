"use strict";
(() => {
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));

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

  // Tables are sorted by the column that is pressed; numbers as numbers.
  const key = (row, column) => {
    const text = row.cells[column].textContent, value = parseFloat(text.replace("−", "-"));
    return Number.isNaN(value) ? text : value;
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  for (const table of all("table")) all("thead th", table).forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      all("thead th", table).forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const rows = Array.from(table.tBodies[0].rows);
      table.tBodies[0].append(...rows.sort((a, b) => sign * compare(key(a, column), key(b, column))));
    });
  });

  // Printed, every feature is shown.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details.choice:not([open])");
    closed.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((one) => { one.open = false; }));

  // One site, in all drawings.
  for (const button of all(".legend button")) button.addEventListener("click", () => {
    const site = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.site;
    document.body.classList.toggle("only", site !== null);
    all("[data-k]").forEach((group) => group.classList.toggle("chosen", group.dataset.k === site));
    all(".legend button").forEach((other) => other.setAttribute("aria-pressed", String(other.dataset.site === site)));
  });

  // Brain slices: red holds the brain, green and blue the t before and after.
  const viewer = document.getElementById("viewer");
  if (!viewer) return;
  const about = JSON.parse(document.getElementById("viewer-data").textContent), image = new Image();
  image.onload = () => {
    const one = document.createElement("canvas");
    one.width = about.width; one.height = about.height;
    const context = one.getContext("2d", { willReadFrequently: true });
    const [slice, least, voxel] = ["slice", "least", "voxel"].map((name) => document.getElementById(name));
    const stops = about.shades.map((hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)));
    const colour = (t) => {
      const half = t < 0 ? stops.slice(0, 3).reverse() : stops.slice(3);
      const at = Math.min(Math.abs(t) / about.top, 1) * 2, k = Math.min(Math.floor(at), 1);
      return half[k].map((value, c) => value + (half[k + 1][c] - value) * (at - k));
    };
    const read = () => {
      context.drawImage(image, 0, -slice.value * about.height);
      return context.getImageData(0, 0, about.width, about.height).data;
    };
    const draw = () => {
      const data = read();
      document.getElementById("slice-out").textContent = `${about.heights[+slice.value]} mm`;
      document.getElementById("least-out").textContent = (+least.value).toFixed(1);
      all("canvas", viewer).forEach((canvas, which) => {
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
    for (const canvas of all("canvas", viewer)) for (const kind of ["pointermove", "pointerdown"]) canvas.addEventListener(kind, (event) => {
      const box = canvas.getBoundingClientRect();
      const x = Math.floor((event.clientX - box.left) / box.width * about.width);
      const y = Math.floor((event.clientY - box.top) / box.height * about.height);
      const p = 4 * (y * about.width + x), data = read();
      const t = (k) => ((data[p + 1 + k] - 128) * about.step).toFixed(1).replace("-", "−");
      const mm = (axis, k) => (axis[0] + k * axis[1]).toFixed(0).replace("-", "−");
      voxel.textContent = data[p] ? `x ${mm(about.x, x)} mm, y ${mm(about.y, y)} mm: t ${t(0)} as measured, ${t(1)} harmonized` : "";
    });
    slice.addEventListener("input", draw);
    least.addEventListener("input", draw);
    viewer.hidden = false;
    draw();
  };
  image.src = about.sheet;
})();
