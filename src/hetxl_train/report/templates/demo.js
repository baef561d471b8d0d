"use strict";
const find = (id) => document.getElementById(id);
const kind = find("try").dataset.kind;
const percent = (share) => (100 * share).toFixed(1) + " %";

function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function bar([name, share]) {
  const item = element("li", "");
  const width = element("span", "", "share");
  width.style.width = percent(share).replace(" ", "");
  item.append(width, element("span", name, "name"), element("span", percent(share), "number"));
  return item;
}

function card(near) {
  const made = element("div", "", "card");
  if (near.image) {
    const image = element("img", "");
    image.src = near.image;
    image.alt = "Row " + near.row;
    made.append(image);
  }
  if (near.text) made.append(element("pre", near.text));
  made.append(element("p", near.label, "label"));
  made.append(element("p", "Row " + near.row, "note"), element("p", "Similarity " + near.similarity.toFixed(2), "note"));
  return made;
}

function doubt(record) {
  const noise = record.entropy > 0 ? Math.max(0, record.from_noise) / record.entropy : 0;
  const [first, second] = record.top.map(([, share]) => share);
  const likely = first >= 0.5 && first >= 2 * (second || 0);
  const sure = first >= 0.9 ? "Sure." : likely ? "Fairly sure." : "Unsure.";
  const confused = record.confused_with === null ? "" : " Most likely confused with " + record.confused_with + ".";
  return sure + " Entropy " + record.entropy.toFixed(2) + " nats, " + percent(noise) + " of it from label noise." + confused;
}

function show(record) {
  find("top").replaceChildren(...record.top.map(bar));
  find("doubt").textContent = doubt(record);
  find("set").textContent = record.set ? "Prediction set: " + record.set : "";
  find("neighbours").replaceChildren(...(record.nearest || []).map(card));
  find("near").hidden = !record.nearest;
  find("answer").hidden = false;
}

async function ask(path, options) {
  find("message").textContent = "Predicting…";
  try {
    const response = await fetch(path, { method: "POST", ...options });
    const answer = await response.json();
    if (!response.ok) throw new Error(typeof answer.detail === "string" ? answer.detail : JSON.stringify(answer.detail));
    show(answer.predictions[0]);
    find("message").textContent = "";
  } catch (error) {
    find("answer").hidden = true;
    find("message").textContent = error.message;
  }
}

function askImage(file) {
  const image = find("shown");
  if (image.src) URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(file);
  image.hidden = false;
  return ask("predict/image", { body: file, headers: { "content-type": "application/octet-stream" } });
}

function askTyped() {
  const typed = find("typed").value;
  const numbers = () => typed.split(/[\s,;]+/).filter((part) => part !== "").map(Number);
  const inputs = kind === "features" ? { features: [numbers()] } : { texts: [typed] };
  return ask("predict", { body: JSON.stringify(inputs), headers: { "content-type": "application/json" } });
}

if (kind === "image") {
  const drop = find("drop");
  drop.addEventListener("dragover", (event) => event.preventDefault());
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) askImage(event.dataTransfer.files[0]);
  });
  drop.addEventListener("keydown", (event) => { if (event.key === "Enter") find("file").click(); });
  find("file").addEventListener("change", (event) => { if (event.target.files.length) askImage(event.target.files[0]); });
} else {
  find("send").addEventListener("click", askTyped);
  find("typed").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) askTyped(); });
}
