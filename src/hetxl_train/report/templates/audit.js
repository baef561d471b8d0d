"use strict";
const section = document.getElementById("decide");
const cards = [...document.querySelectorAll(".suspect")];
const key = "hetxl-audit-" + section.dataset.audit;
const filters = { pair: document.getElementById("pair"), class: document.getElementById("class") };
let decisions = JSON.parse(localStorage.getItem(key) || "{}");

const idOf = (card) => [card.dataset.row, card.dataset.label, card.dataset.suggestion].join("\t");
const names = {
  pair: (card) => (card.dataset.label || "(no label)") + " → " + (card.dataset.suggestion || "(remove)"),
  class: (card) => card.dataset.label || "(no label)",
};

function show() {
  for (const card of cards) {
    card.dataset.decision = decisions[idOf(card)] || "";
    card.hidden = Object.keys(filters).some((kind) => filters[kind].value && names[kind](card) !== filters[kind].value);
  }
  const made = Object.values(decisions);
  const corrected = made.filter((decision) => decision === "correct").length;
  document.getElementById("count").textContent =
    made.length + " of " + cards.length + " decided, " + corrected + " to correct";
}

function decide(card, decision) {
  if (decision) decisions[idOf(card)] = decision;
  else delete decisions[idOf(card)];
  localStorage.setItem(key, JSON.stringify(decisions));
  show();
}

function move(from, step) {
  const seen = cards.filter((card) => !card.hidden);
  const next = seen[Math.min(Math.max(seen.indexOf(from) + step, 0), seen.length - 1)];
  if (next) next.focus();
}

function field(text) {
  return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
}

function csv() {
  const rows = cards.filter((card) => decisions[idOf(card)]).map((card) =>
    [card.dataset.row, card.dataset.label, card.dataset.suggestion, decisions[idOf(card)]].map(field).join(","));
  return ["row,label,suggestion,decision", ...rows].join("\r\n") + "\r\n";
}

function filter(values) {
  for (const kind of Object.keys(filters)) filters[kind].value = values[kind] || "";
  show();
  section.scrollIntoView();
}

for (const [kind, select] of Object.entries(filters)) {
  const counts = new Map();
  for (const card of cards) counts.set(names[kind](card), (counts.get(names[kind](card)) || 0) + 1);
  for (const [name, count] of [...counts].sort((a, b) => b[1] - a[1])) {
    const option = document.createElement("option");
    option.value = name;
    option.textContent = name + " (" + count + ")";
    select.append(option);
  }
  select.addEventListener("change", show);
}
// Rows of the tables lead to the suspects that they count.
for (const [id, kind, width] of [["pairs", "pair", 2], ["classes", "class", 1]])
  for (const row of document.querySelectorAll("#" + id + " tbody tr")) {
    const value = [...row.cells].slice(0, width).map((cell) => cell.textContent.trim()).join(" → ");
    row.tabIndex = 0;
    row.style.cursor = "pointer";
    row.addEventListener("click", () => filter({ [kind]: value }));
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") filter({ [kind]: value }); });
  }
section.addEventListener("click", (event) => {
  const decision = event.target.dataset.decision;
  const card = event.target.closest(".suspect");
  if (card && event.target.tagName === "BUTTON") decide(card, card.dataset.decision === decision ? "" : decision);
});
section.addEventListener("keydown", (event) => {
  const card = document.activeElement.closest(".suspect");
  const act = { c: "correct", l: "keep", u: "" }[event.key];
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  if (card && act !== undefined) { decide(card, act); if (act) move(card, 1); }
  else if (event.key === "j" || event.key === "k") move(card, event.key === "j" ? 1 : -1);
});
document.getElementById("save").addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
  link.download = "decisions.csv";
  link.click();
});
show();
