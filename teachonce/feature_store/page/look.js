// Highlights the runs of the selected alignment, and shows the stored features of a token.
const state = { alignment: Object.keys(page.alignments)[0] ?? null, view: 0, map: page.maps[0] ?? null };
const sections = [...document.querySelectorAll("section.sequence")].map((element, number) => new SequenceSection(element, page.sequences[number]));

function create(name, text, attributes = {}) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function percent(share) {
  return share >= 0.0995 ? `${(100 * share).toFixed(0)} %` : `${(100 * share).toPrecision(2)} %`;
}

// Directional isolates: a right-to-left piece would reorder the sentence around it.
function quoted(text) {
  return `“\u2068${text}\u2069”`;
}

function table(headings, rows) {
  const result = create("table"), head = create("tr"), body = create("tbody");
  for (const heading of headings) head.append(create("th", heading, { scope: "col" }));
  for (const [share, label, ...cells] of rows) {
    const row = create("tr");
    for (const cell of cells) {
      const code = create("td");
      code.append(create("code", cell));
      row.append(code);
    }
    const bar = create("td", label, { class: "number bar" });
    bar.style.setProperty("--share", share);
    row.append(bar);
    body.append(row);
  }
  const top = create("thead");
  top.append(head);
  result.append(top, body);
  return result;
}

function SequenceSection(element, data) {
  const panel = element.querySelector(".panel"), canvas = element.querySelector("canvas");
  const maps = {}; // decoded, by name and view
  let selected = null; // side and number of the selected token, which the panel shows again when the pointer leaves

  const lattice = () => element.querySelector(".lattice:not([hidden])");
  const key = () => (state.alignment && state.alignment in data.students ? state.alignment : "own");
  const rows = (side) => (side === "teacher" ? data.teacher : data.students[key()]);
  const runs = () => (state.alignment ? data.runs[state.alignment] : []);
  const find = (side, number) => lattice().querySelector(`[data-side=${side}][data-token="${number}"]`);
  const of = (button) => ({ side: button.dataset.side, number: Number(button.dataset.token) });

  function runIndex(side, number) {
    const at = side === "teacher" ? 0 : 2;
    return runs().findIndex((run) => run[at] <= number && number < run[at + 1]);
  }

  this.update = function () {
    for (const layout of element.querySelectorAll(".lattice")) layout.hidden = layout.dataset.tokens !== key();
    for (const button of lattice().querySelectorAll(".token")) {
      const { side, number } = of(button), index = runIndex(side, number);
      button.classList.toggle("in", index >= 0);
      button.classList.toggle("odd", index % 2 === 1);
      button.classList.toggle("out", index < 0 && state.alignment !== null && !button.classList.contains("special"));
    }
    for (const atom of lattice().querySelectorAll(".atom")) {
      const begin = Number(atom.dataset.begin), end = Number(atom.dataset.end);
      const span = data.masks[state.view].find((mask) => mask[0] < end && begin < mask[1]);
      atom.classList.toggle("masked", span !== undefined);
      if (span) atom.dataset.action = span[2];
    }
    if (selected && !find(selected.side, selected.number)) selected = null;
    choose(selected ?? interesting());
    decode().then(() => { draw(); describe(selected); });
  };

  // The token selected at first: one with several student tokens shows best what a run is.
  function interesting() {
    const several = runs().find((run) => run[1] - run[0] === 1 && run[3] - run[2] > 1) ?? runs()[0];
    return { side: "teacher", number: several ? several[0] : data.teacher.findIndex((row) => !row[3]) };
  }

  function light(token) {
    for (const lit of element.querySelectorAll(".lit")) lit.classList.remove("lit");
    const run = runs()[runIndex(token.side, token.number)];
    const numbers = { teacher: [], student: [] };
    numbers[token.side].push(token.number);
    if (run) {
      for (let t = run[0]; t < run[1]; t++) numbers.teacher.push(t);
      for (let s = run[2]; s < run[3]; s++) numbers.student.push(s);
    }
    const spans = [];
    for (const side of Object.keys(numbers)) {
      for (const number of numbers[side]) {
        find(side, number)?.classList.add("lit");
        const [, begin, end, special] = rows(side)[number];
        if (!special) spans.push([begin, end]);
      }
    }
    for (const atom of lattice().querySelectorAll(".atom")) {
      const begin = Number(atom.dataset.begin), end = Number(atom.dataset.end);
      if (spans.some((span) => span[0] < end && begin < span[1])) atom.classList.add("lit");
    }
    return run;
  }

  function piecesOf(side, from, to) {
    return rows(side).slice(from, to).map((row) => quoted(row[0])).join(" ");
  }

  function describe(token) {
    const run = light(token), details = panel.querySelector(".more");
    const [piece, begin, end, special, , text] = rows(token.side)[token.number];
    const spelled = piece.endsWith(text.trim()) ? "" : `, which is ${quoted(text)} in the text`;
    const where = special ? "has no text" : `characters ${begin} to ${end}${spelled}`;
    let description = `The ${token.side}’s token ${token.number}, ${quoted(piece)}: ${where}. `;
    if (run) {
      description += `${state.alignment} pairs the teacher’s ${piecesOf("teacher", run[0], run[1])} with the student’s ${piecesOf("student", run[2], run[3])} (${run[1] - run[0]} : ${run[3] - run[2]}).`;
    } else if (state.alignment && !special) {
      description += `It is in no run of ${state.alignment}.`;
    }
    panel.querySelector(".description").textContent = description;
    details.replaceChildren();
    const teacher = token.side === "teacher" ? token.number : run && run[1] - run[0] === 1 ? run[0] : null;
    if (teacher !== null) logits(teacher, details);
    else if (page.hasLogits) details.append(create("p", run ? "The run has several tokens of the teacher, so it has no single distribution." : "", { class: "quiet" }));
    if (token.side === "teacher") attention(token.number, details);
    for (const button of lattice().querySelectorAll(".token")) button.style.removeProperty("--look");
    const map = current();
    if (map && token.side === "teacher") {
      for (let other = 0; other < map.size; other++) find("teacher", other)?.style.setProperty("--look", Math.sqrt(map.at(token.number, other)).toFixed(3));
    }
  }

  function logits(teacher, details) {
    const best = data.best[state.view][teacher];
    if (!best?.length) return;
    const way = state.alignment && page.alignments[state.alignment].predicted;
    const studentPiece = (id) => page.pieces[id][way === "same" ? 1 : 2] ?? "–";
    const lines = best.map(([id, share]) => [share, page.draws ? `${Math.round(share * page.draws)} of ${page.draws}` : percent(share), page.pieces[id][0], ...(way ? [studentPiece(id)] : [])]);
    const rest = Math.max(0, 1 - best.reduce((sum, [, share]) => sum + share, 0));
    lines.push([rest, percent(rest), "others", ...(way ? [""] : [])]);
    details.append(create("h4", `Most likely pieces ${page.nextToken ? "for the next token" : "here"}${page.views > 1 ? `, view ${state.view}` : ""}`));
    details.append(table(["piece", ...(way ? [way === "same" ? "the student’s identical piece" : "the student’s first piece"] : []), page.draws ? "draws" : "probability"], lines));
  }

  function attention(number, details) {
    const map = current();
    if (!map) return;
    const lines = map.most(number, 5).map(([other, share]) => [share, percent(share), data.teacher[other][0]]);
    details.append(create("h4", "Attention of this token"), table(["token", "attention"], lines));
  }

  function choose(token) {
    if (selected) find(selected.side, selected.number)?.setAttribute("aria-pressed", "false");
    for (const button of lattice().querySelectorAll("[tabindex='0']")) button.tabIndex = -1;
    selected = token;
    const button = find(token.side, token.number);
    button.setAttribute("aria-pressed", "true");
    button.tabIndex = 0;
    describe(token);
    draw();
  }

  // The arrow keys up and down change sides: to the first token of the same run, else to the token at the same characters.
  function across(token) {
    const other = token.side === "teacher" ? "student" : "teacher", run = runs()[runIndex(token.side, token.number)];
    if (!data.students[key()]) return token;
    if (run) return { side: other, number: run[other === "teacher" ? 0 : 2] };
    const begin = rows(token.side)[token.number][1];
    const near = rows(other).findIndex((row) => row[1] >= begin && !row[3]);
    return { side: other, number: Math.max(0, near) };
  }

  // A lattice is one stop of the Tab key (tabindex 0 on one token); arrow keys move inside it.
  element.addEventListener("keydown", (event) => {
    const button = event.target.closest?.(".lattice .token");
    if (!button) return;
    const token = of(button), last = rows(token.side).length - 1;
    const forward = getComputedStyle(button.closest(".lattice")).direction === "rtl" ? -1 : 1;
    const steps = { ArrowRight: token.number + forward, ArrowLeft: token.number - forward, Home: 0, End: last };
    let next = null;
    if (event.key in steps) next = { side: token.side, number: Math.min(last, Math.max(0, steps[event.key])) };
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") next = across(token);
    if (!next) return;
    event.preventDefault();
    button.tabIndex = -1;
    const target = find(next.side, next.number);
    target.tabIndex = 0;
    target.focus();
  });
  element.addEventListener("focusin", (event) => { const button = event.target.closest?.(".lattice .token"); if (button) describe(of(button)); });
  element.addEventListener("focusout", (event) => { if (event.target.closest?.(".lattice") && !lattice().contains(event.relatedTarget)) describe(selected); });
  element.addEventListener("pointerover", (event) => { const button = event.target.closest?.(".lattice .token"); if (button && event.pointerType === "mouse") describe(of(button)); });
  element.querySelectorAll(".lattice").forEach((layout) => layout.addEventListener("pointerleave", () => describe(selected)));
  element.addEventListener("click", (event) => {
    const button = event.target.closest?.(".lattice .token");
    if (button) { choose(of(button)); document.body.classList.add("used"); } // on a phone the panel then stays visible (look.css)
  });

  function current() {
    return maps[`${state.map} ${state.view}`];
  }

  async function decode() {
    const name = `${state.map} ${state.view}`, packed = data.attention[state.map]?.[state.view];
    if (!packed || maps[name]) return;
    const stream = new Blob([Uint8Array.from(atob(packed), (c) => c.charCodeAt(0))]).stream();
    const values = new Uint8Array(await new Response(stream.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
    const size = data.teacher.length, at = (row, column) => (values[row * size + column] / 255) ** 2;
    const most = (row, count) => [...Array(size).keys()].map((column) => [column, at(row, column)]).sort((a, b) => b[1] - a[1]).slice(0, count);
    maps[name] = { values, size, at, most };
  }

  function draw() {
    const map = current();
    if (!canvas || !map) return;
    canvas.width = canvas.height = map.size;
    const context = canvas.getContext("2d"), image = context.createImageData(map.size, map.size);
    const heat = dark.matches ? [245, 169, 127] : [179, 71, 0];
    map.values.forEach((value, index) => image.data.set([...heat, value], 4 * index));
    context.putImageData(image, 0, 0);
    if (selected?.side === "teacher") {
      context.fillStyle = dark.matches ? "rgb(124 184 255 / .35)" : "rgb(11 92 173 / .22)";
      context.fillRect(0, selected.number, map.size, 1);
    }
    const body = element.querySelector(".shares tbody");
    body.replaceChildren(...data.teacher.map((row, number) => {
      const line = create("tr");
      const most = map.most(number, 5).map(([other, share]) => `${data.teacher[other][0]} ${percent(share)}`);
      line.append(create("td", number, { class: "number" }), create("td", row[0]), create("td", most.join("  ")));
      return line;
    }));
  }

  function cellAt(event) {
    const box = canvas.getBoundingClientRect(), size = data.teacher.length;
    const at = (value, from, length) => Math.min(size - 1, Math.max(0, Math.floor(((value - from) / length) * size)));
    return [at(event.clientY, box.top, box.height), at(event.clientX, box.left, box.width)];
  }
  canvas?.addEventListener("pointermove", (event) => {
    const [row, column] = cellAt(event), map = current();
    if (map) element.querySelector(".reading").textContent = `${data.teacher[row][0]} (${row}) attends to ${data.teacher[column][0]} (${column}): ${percent(map.at(row, column))}`;
  });
  canvas?.addEventListener("click", (event) => choose({ side: "teacher", number: cellAt(event)[0] }));
  this.draw = draw;
}

function update() {
  for (const about of document.querySelectorAll("[data-about]")) about.hidden = about.dataset.about !== state.alignment;
  for (const section of sections) section.update();
  document.body.dataset.shown = `${state.alignment ?? ""} ${state.view}`.trim();
}
for (const radio of document.querySelectorAll("[name=alignment]")) radio.addEventListener("change", () => { state.alignment = radio.value; update(); });
document.getElementById("view")?.addEventListener("change", (event) => { state.view = Number(event.target.value); update(); });
document.getElementById("map")?.addEventListener("change", (event) => { state.map = event.target.value; update(); });
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => { for (const section of sections) section.draw(); });
update();
