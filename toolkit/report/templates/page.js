"use strict";
// The page is complete without this script. It adds: values under the pointer, curves that light up, copy buttons.
(() => {
  const readouts = JSON.parse(document.getElementById("readouts").textContent);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const element = (name, text = "", className = "") => {
    const made = document.createElement(name);
    made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const scientific = (value) => (value === 0 ? "0" : value.toExponential(1).replace("e+", "e"));
  const count = (value) => {
    const power = Math.min(5, Math.max(0, Math.floor(Math.log10(Math.max(1, Math.abs(value))) / 3)));
    return `${Number((value / 1000 ** power).toPrecision(4))}${["", "k", "M", "B", "T", "P"][power]}`;
  };
  const print = { scientific, count, decimal: (value) => String(Number(value.toPrecision(5))) };

  Object.values(readouts.charts).forEach((chart) => chart.lines.forEach((line) => {
    const first = line.x;
    if (typeof first === "number") line.x = line.y.map((_, index) => first + index);
  }));

  // Curves of one strategy light up in all plots, from its row, its legend or its column. A tap keeps them lit.
  let kept = "";
  const light = (key) => {
    all(".lit").forEach((lit) => lit.classList.remove("lit"));
    if (!key) return document.body.removeAttribute("data-lit");
    document.body.setAttribute("data-lit", "");
    return all(`[data-k="${CSS.escape(key)}"]`).forEach((one) => one.classList.add("lit"));
  };
  all("tr[data-k], li[data-k], th[data-k]").forEach((handle) => {
    const key = handle.dataset.k;
    handle.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && light(key));
    handle.addEventListener("pointerleave", () => light(kept));
    handle.addEventListener("click", () => light((kept = kept === key ? "" : key)));
  });

  // The values at the step under the pointer. The title of a drawing would hide them as a tooltip.
  const nearest = (steps, step) => {
    let low = 0;
    let high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle;
      else high = middle;
    }
    return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
  };
  const show = (svg, x) => {
    const data = readouts.charts[svg.dataset.chart];
    const box = svg.parentElement.querySelector(".readout");
    const cursor = svg.querySelector(".cursor");
    const [left, right] = svg.dataset.frame.split(" ").map(Number);
    const [first, last] = svg.dataset.steps.split(" ").map(Number);
    const wanted = first + (Math.min(1, Math.max(0, (x - left) / (right - left)))) * (last - first);
    const longest = data.lines.reduce((a, b) => (b.x.length > a.length ? b.x : a), []);
    if (!longest.length) return;
    const step = longest[nearest(longest, wanted)];
    const reach = Math.max(1, (last - first) / 100);
    const place = left + ((step - first) / (last - first)) * (right - left);
    cursor.setAttribute("transform", `translate(${place})`);
    cursor.removeAttribute("hidden");
    const rows = data.lines.flatMap((line) => {
      const at = nearest(line.x, step);
      return Math.abs(line.x[at] - step) <= reach ? [[line, line.y[at]]] : [];
    });
    rows.sort((a, b) => b[1] - a[1]);
    const table = element("table");
    rows.slice(0, 14).forEach(([line, value]) => {
      const row = table.insertRow();
      const name = element("th");
      const color = element("i");
      color.style.background = `var(--${line.tone})`;
      name.append(color, line.label);
      row.append(name, element("td", print[data.numbers](value)));
    });
    box.replaceChildren(element("strong", `step ${step}`), table);
    if (rows.length > 14) box.append(element("span", `and ${rows.length - 14} more`));
    box.hidden = false;
    const scale = svg.clientWidth / svg.viewBox.baseVal.width;
    const room = svg.clientWidth - box.offsetWidth;
    const beside = place * scale + 14;
    box.style.left = `${Math.max(0, beside > room ? Math.min(room, place * scale - 14 - box.offsetWidth) : beside)}px`;
    svg.dataset.at = String(step);
  };
  const hide = (svg) => {
    svg.parentElement.querySelector(".readout").hidden = true;
    svg.querySelector(".cursor").setAttribute("hidden", "hidden");
  };
  all("svg.chart[data-chart]").forEach((svg) => {
    const title = svg.querySelector("title");
    svg.setAttribute("aria-label", title.textContent);
    svg.removeAttribute("aria-labelledby");
    svg.setAttribute("aria-describedby", svg.querySelector("desc").id);
    title.remove();
    svg.setAttribute("tabindex", "0");
    const at = (event) => {
      const frame = svg.getBoundingClientRect();
      show(svg, ((event.clientX - frame.left) / frame.width) * svg.viewBox.baseVal.width);
    };
    svg.addEventListener("pointermove", at);
    svg.addEventListener("pointerdown", at);
    svg.addEventListener("pointerleave", () => hide(svg));
    svg.addEventListener("blur", () => hide(svg));
    svg.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.preventDefault();
      const [left, right] = svg.dataset.frame.split(" ").map(Number);
      const [first, last] = svg.dataset.steps.split(" ").map(Number);
      const move = Math.max(1, Math.round((last - first) / 100)) * (event.key === "ArrowLeft" ? -1 : 1);
      const step = Number(svg.dataset.at ?? first - move) + move;
      show(svg, left + ((step - first) / (last - first)) * (right - left));
    });
  });

  // Ratio and cosine of the square under the pointer.
  const line = document.querySelector(".heat-readout");
  if (line) {
    const idle = "Point at a square, or tap it, for its numbers.";
    const say = (value, digits) => (value === null ? readouts.heat.unknown : value.toFixed(digits));
    line.hidden = false;
    line.textContent = idle;
    const point = (event) => {
      all(".heat td.on").forEach((cell) => cell.classList.remove("on"));
      const cell = event.target.closest(".heat td");
      const row = cell && readouts.heat.rows[cell.parentElement.dataset.r];
      const numbers = row && row.cells[cell.cellIndex - 1];
      if (!numbers) return void (line.textContent = idle);
      cell.classList.add("on");
      const size = numbers[0] === null ? readouts.heat.unknown : scientific(numbers[0]);
      line.replaceChildren(
        element("code", row.name),
        ` in ${readouts.heat.columns[cell.cellIndex - 1]}: difference ${size}, `,
        `norm ratio ${say(numbers[1], 6)}, cosine ${say(numbers[2], 7)}`,
      );
    };
    document.querySelector(".heat").addEventListener("pointerover", point);
    document.querySelector(".heat").addEventListener("click", point);
  }

  if (navigator.clipboard) {
    all(".command").forEach((command) => {
      const button = element("button", "copy");
      button.type = "button";
      button.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(command.querySelector("code").textContent);
          button.textContent = "copied";
        } catch {
          button.textContent = "cannot copy";
        }
        setTimeout(() => (button.textContent = "copy"), 1500);
      });
      command.append(button);
    });
  }

  // Paper shows everything.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open])");
    closed.forEach((one) => (one.open = true));
  });
  addEventListener("afterprint", () => closed.forEach((one) => (one.open = false)));
})();
