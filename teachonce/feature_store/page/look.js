// Highlights the runs of the selected alignment, and shows the stored features of a token.
const state = { alignment: Object.keys(page.alignments)[0] ?? null, view: 0, map: page.maps[0] ?? null };
const sections = [...document.querySelectorAll("section.sequence")].map((element, number) => new SequenceSection(element, page.sequences[number]));

function made(name, text, attributes = {}) {
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
  const found = made("table"), head = made("tr"), body = made("tbody");
  for (const heading of headings) head.append(made("th", heading, { scope: "col" }));
  for (const [share, label, ...cells] of rows) {
    const row = made("tr");
    for (const cell of cells) {
      const code = made("td");
      code.append(made("code", cell));
      row.append(code);
    }
    const bar = made("td", label, { class: "number bar" });
    bar.style.setProperty("--share", share);
    row.append(bar);
    body.append(row);
  }
  const top = made("thead");
  top.append(head);
  found.append(top, body);
  return found;
}

function SequenceSection(element, data) {
  const panel = element.querySelector(".panel"), canvas = element.querySelector("canvas");
  const maps = {}; // decoded, by name and view
  let chosen = null; // side and number of the selected token, which the panel shows again when the pointer leaves

  const lattice = () => element.querySelector(".lattice:not([hidden])");
  const key = () => (state.alignment && state.alignment in data.students ? state.alignment : "own");
  const rows = (side) => (side === "teacher" ? data.teacher : data.students[key()]);
  const runs = () => (state.alignment ? data.runs[state.alignment] : []);
  const find = (side, number) => lattice().querySelector(`[data-side=${side}][data-token="${number}"]`);
  const of = (button) => ({ side: button.dataset.side, number: Number(button.dataset.token) });

  function run(side, number) {
    const at = side === "teacher" ? 0 : 2;
    return runs().findIndex((each) => each[at] <= number && number < each[at + 1]);
  }

  this.update = function () {
    for (const each of element.querySelectorAll(".lattice")) each.hidden = each.dataset.tokens !== key();
    for (const button of lattice().querySelectorAll(".token")) {
      const { side, number } = of(button), found = run(side, number);
      button.classList.toggle("in", found >= 0);
      button.classList.toggle("odd", found % 2 === 1);
      button.classList.toggle("out", found < 0 && state.alignment !== null && !button.classList.contains("special"));
    }
    for (const atom of lattice().querySelectorAll(".atom")) {
      const begin = Number(atom.dataset.begin), end = Number(atom.dataset.end);
      const span = data.masks[state.view].find((each) => each[0] < end && begin < each[1]);
      atom.classList.toggle("masked", span !== undefined);
      if (span) atom.dataset.action = span[2];
    }
    if (chosen && !find(chosen.side, chosen.number)) chosen = null;
    choose(chosen ?? interesting());
    decode().then(() => { draw(); describe(chosen); });
  };

  // The token selected at first: one with several student tokens shows best what a run is.
  function interesting() {
    const several = runs().find((each) => each[1] - each[0] === 1 && each[3] - each[2] > 1) ?? runs()[0];
    return { side: "teacher", number: several ? several[0] : data.teacher.findIndex((row) => !row[3]) };
  }

  function light(token) {
    for (const lit of element.querySelectorAll(".lit")) lit.classList.remove("lit");
    const found = run(token.side, token.number), each = runs()[found];
    const numbers = { teacher: [], student: [] };
    numbers[token.side].push(token.number);
    if (each) {
      for (let t = each[0]; t < each[1]; t++) numbers.teacher.push(t);
      for (let s = each[2]; s < each[3]; s++) numbers.student.push(s);
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
    return each;
  }

  function piecesOf(side, from, to) {
    return rows(side).slice(from, to).map((row) => quoted(row[0])).join(" ");
  }

  function describe(token) {
    const each = light(token), more = panel.querySelector(".more");
    const [piece, begin, end, special, , text] = rows(token.side)[token.number];
    const spelled = piece.endsWith(text.trim()) ? "" : `, which is ${quoted(text)} in the text`;
    const where = special ? "has no text" : `characters ${begin} to ${end}${spelled}`;
    let description = `The ${token.side}’s token ${token.number}, ${quoted(piece)}: ${where}. `;
    if (each) {
      description += `${state.alignment} pairs the teacher’s ${piecesOf("teacher", each[0], each[1])} with the student’s ${piecesOf("student", each[2], each[3])} (${each[1] - each[0]} : ${each[3] - each[2]}).`;
    } else if (state.alignment && !special) {
      description += `It is in no run of ${state.alignment}.`;
    }
    panel.querySelector(".description").textContent = description;
    more.replaceChildren();
    const teacher = token.side === "teacher" ? token.number : each && each[1] - each[0] === 1 ? each[0] : null;
    if (teacher !== null) logits(teacher, more);
    else if (page.hasLogits) more.append(made("p", each ? "The run has several tokens of the teacher, so it has no single distribution." : "", { class: "quiet" }));
    if (token.side === "teacher") attention(token.number, more);
    for (const button of lattice().querySelectorAll(".token")) button.style.removeProperty("--look");
    const map = current();
    if (map && token.side === "teacher") {
      for (let other = 0; other < map.size; other++) find("teacher", other)?.style.setProperty("--look", Math.sqrt(map.at(token.number, other)).toFixed(3));
    }
  }

  function logits(teacher, more) {
    const best = data.best[state.view][teacher];
    if (!best?.length) return;
    const way = state.alignment && page.alignments[state.alignment].predicted;
    const studentPiece = (id) => page.pieces[id][way === "same" ? 1 : 2] ?? "–";
    const lines = best.map(([id, share]) => [share, page.draws ? `${Math.round(share * page.draws)} of ${page.draws}` : percent(share), page.pieces[id][0], ...(way ? [studentPiece(id)] : [])]);
    const rest = Math.max(0, 1 - best.reduce((sum, [, share]) => sum + share, 0));
    lines.push([rest, percent(rest), "others", ...(way ? [""] : [])]);
    more.append(made("h4", `Most likely pieces ${page.nextToken ? "for the next token" : "here"}${page.views > 1 ? `, view ${state.view}` : ""}`));
    more.append(table(["piece", ...(way ? [way === "same" ? "the student’s identical piece" : "the student’s first piece"] : []), page.draws ? "draws" : "probability"], lines));
  }

  function attention(number, more) {
    const map = current();
    if (!map) return;
    const lines = map.most(number, 5).map(([other, share]) => [share, percent(share), data.teacher[other][0]]);
    more.append(made("h4", "Attention of this token"), table(["token", "attention"], lines));
  }

  function choose(token) {
    if (chosen) find(chosen.side, chosen.number)?.setAttribute("aria-pressed", "false");
    for (const button of lattice().querySelectorAll("[tabindex='0']")) button.tabIndex = -1;
    chosen = token;
    const button = find(token.side, token.number);
    button.setAttribute("aria-pressed", "true");
    button.tabIndex = 0;
    describe(token);
    draw();
  }

  // The arrow keys up and down change sides: to the first token of the same run, else to the token at the same characters.
  function across(token) {
    const other = token.side === "teacher" ? "student" : "teacher", each = runs()[run(token.side, token.number)];
    if (!data.students[key()]) return token;
    if (each) return { side: other, number: each[other === "teacher" ? 0 : 2] };
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
  element.addEventListener("focusout", (event) => { if (event.target.closest?.(".lattice") && !lattice().contains(event.relatedTarget)) describe(chosen); });
  element.addEventListener("pointerover", (event) => { const button = event.target.closest?.(".lattice .token"); if (button && event.pointerType === "mouse") describe(of(button)); });
  element.querySelectorAll(".lattice").forEach((each) => each.addEventListener("pointerleave", () => describe(chosen)));
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
    map.values.forEach((value, place) => image.data.set([...heat, value], 4 * place));
    context.putImageData(image, 0, 0);
    if (chosen?.side === "teacher") {
      context.fillStyle = dark.matches ? "rgb(124 184 255 / .35)" : "rgb(11 92 173 / .22)";
      context.fillRect(0, chosen.number, map.size, 1);
    }
    const body = element.querySelector(".shares tbody");
    body.replaceChildren(...data.teacher.map((row, number) => {
      const line = made("tr");
      const most = map.most(number, 5).map(([other, share]) => `${data.teacher[other][0]} ${percent(share)}`);
      line.append(made("td", number, { class: "number" }), made("td", row[0]), made("td", most.join("  ")));
      return line;
    }));
  }

  function place(event) {
    const box = canvas.getBoundingClientRect(), size = data.teacher.length;
    const at = (value, from, length) => Math.min(size - 1, Math.max(0, Math.floor(((value - from) / length) * size)));
    return [at(event.clientY, box.top, box.height), at(event.clientX, box.left, box.width)];
  }
  canvas?.addEventListener("pointermove", (event) => {
    const [row, column] = place(event), map = current();
    if (map) element.querySelector(".reading").textContent = `${data.teacher[row][0]} (${row}) attends to ${data.teacher[column][0]} (${column}): ${percent(map.at(row, column))}`;
  });
  canvas?.addEventListener("click", (event) => choose({ side: "teacher", number: place(event)[0] }));
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
