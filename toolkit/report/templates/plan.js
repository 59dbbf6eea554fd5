// Candidates of a search: filters and an order for the table, which the points follow, and the point under the pointer.
(() => {
  const table = document.getElementById("candidates");
  const form = document.querySelector(".filters");
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...table.tBodies[0].rows];
  const points = [...document.querySelectorAll(".scatter circle")];
  const byKey = new Map(rows.map((row) => [row.dataset.k, row]));

  const filter = () => {
    const wanted = [...form.querySelectorAll("select")].filter((one) => one.value);
    const passes = (row) => wanted.every((one) => row.cells[one.dataset.column].textContent === one.value);
    rows.forEach((row) => (row.hidden = !passes(row)));
    points.forEach((point) => point.classList.toggle("out", byKey.get(point.dataset.k).hidden));
    const count = rows.filter((row) => !row.hidden).length;
    form.querySelector("output").textContent = `${count} of ${rows.length}`;
  };
  form.hidden = false;
  form.addEventListener("change", filter);
  form.querySelector("button").addEventListener("click", () => {
    form.reset();
    filter();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();

  const value = (row, column) => {
    const text = row.cells[column].textContent;
    const number = Number(text.replaceAll(",", ""));
    return Number.isNaN(number) ? text : number;
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
      rows.sort((a, b) => order(value(a, column), value(b, column)));
      table.tBodies[0].append(...rows);
    });
  });

  const said = ["GiB", "tokens/s/GPU", "step s", "MFU %", "fits"];
  document.querySelectorAll(".scatter").forEach((svg) => {
    const box = svg.parentElement.querySelector(".readout");
    const mine = [...svg.querySelectorAll("circle")];
    mine.forEach((point) => point.querySelector("title").remove());
    const nearest = (event) => {
      const frame = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / frame.width;
      const x = (event.clientX - frame.left) * scale;
      const y = (event.clientY - frame.top) * scale;
      const far = (point) => Math.hypot(point.cx.baseVal.value - x, point.cy.baseVal.value - y);
      const seen = mine.filter((point) => !point.classList.contains("out"));
      const found = seen.reduce((a, b) => (a && far(a) <= far(b) ? a : b), null);
      return found && far(found) < 24 ? found : null;
    };
    const hide = () => {
      box.hidden = true;
      mine.forEach((point) => point.classList.remove("at"));
    };
    const show = (event) => {
      hide();
      const point = nearest(event);
      if (!point) return;
      point.classList.add("at");
      const row = byKey.get(point.dataset.k);
      const title = document.createElement("strong");
      title.textContent = row.cells[0].textContent;
      const list = document.createElement("table");
      said.forEach((name) => {
        const column = heads.findIndex((head) => head.textContent === name);
        const line = list.insertRow();
        line.append(Object.assign(document.createElement("th"), { textContent: name }));
        line.append(Object.assign(document.createElement("td"), { textContent: row.cells[column].textContent }));
      });
      box.replaceChildren(title, list);
      box.hidden = false;
      const scale = svg.clientWidth / svg.viewBox.baseVal.width;
      const across = point.cx.baseVal.value * scale;
      const left = across + 14 + box.offsetWidth > svg.clientWidth ? across - 14 - box.offsetWidth : across + 14;
      box.style.left = `${Math.max(0, left)}px`;
      box.style.top = `${Math.max(0, point.cy.baseVal.value * scale - box.offsetHeight - 8)}px`;
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("click", (event) => {
      const point = nearest(event);
      if (!point) return;
      const row = byKey.get(point.dataset.k);
      row.click(); // page.js keeps it lit
      const place = row.closest(".scroll");
      place.scrollTop = row.offsetTop - place.clientHeight / 2;
    });
  });
})();
