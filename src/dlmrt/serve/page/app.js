// The page: asks the server, records the canvas of one or two answers, replays them.

import { CanvasView, Recording } from "./canvas.js";

const $ = (id) => document.getElementById(id);
const NAMES = ["A", "B"];
const LABELS = { commit_rule: "rule", threshold: "threshold", max_denoising_steps: "steps a block", temperature: "temperature",
  seed: "seed", max_tokens: "tokens at the most" };
const EXAMPLES = [
  "A cake has 60 servings. If Emma can eat 4 servings a day while Liam can eat 2 times as much, how many days will the cake last?",
  "There are 7 girls in the garden. If there are 3 times the number of boys in the garden, how many kids are in the garden?",
  "A loaf of bread at the market costs $7. Croissants cost $1 each. How much more do 3 loaves of bread cost than 8 croissants?",
  "State the final answer to the following arithmetic problem: 41 - 16 + 27 =",
];
const NUMBERS = ["threshold", "max_denoising_steps", "temperature", "seed", "max_tokens"];

let model = null;
let lanes = []; // {name, root, view, recording, settings}
let running = null; // AbortController of the request in progress
let player = null; // timer of the replay

// ---- settings -----------------------------------------------------------------------------------------------------

function addSettings(name, values) {
  const fieldset = $("settings-template").content.firstElementChild.cloneNode(true);
  fieldset.id = `settings-${name}`;
  for (const [key, value] of Object.entries(values)) fieldset.querySelector(`[name=${key}]`).value = value;
  $("settings").append(fieldset);
}

function readSettings(name) {
  const settings = {};
  for (const field of $(`settings-${name}`).querySelectorAll("[name]")) {
    if (field.value === "") continue;
    settings[field.name] = NUMBERS.includes(field.name) ? Number(field.value) : field.value;
  }
  return settings;
}

function isRace() {
  return $("race").checked;
}

function layOut() {
  const two = isRace();
  for (const id of ["settings", "lanes"]) $(id).classList.toggle("two", two);
  $("settings-B").hidden = !two;
  $("settings-A").querySelector("legend").textContent = two ? "A" : "Settings";
  $("settings-B").querySelector("legend").textContent = "B";
}

function describe(settings) {
  const counted = (key) => /^(max_denoising_steps|max_tokens)$/.test(key);
  const words = Object.entries(settings).map(([key, value]) =>
    (counted(key) ? `${value} ${LABELS[key]}` : `${LABELS[key]} ${value}`));
  return words.join(", ") || "The model\u2019s own settings";
}

// ---- one request --------------------------------------------------------------------------------------------------

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

async function ask(lane) {
  const prompt = $("prompt").value;
  const isRaw = $("raw").checked;
  const { seed, max_tokens, temperature, ...diffusion } = lane.settings;
  const body = {
    ...(isRaw ? { prompt } : { messages: [{ role: "user", content: prompt }] }),
    seed, max_tokens, temperature, stream: true, stream_options: { include_usage: true },
    diffusion: { ...diffusion, return_canvas: true },
  };
  running = new AbortController();
  const response = await fetch(isRaw ? "v1/completions" : "v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
  });
  if (!response.ok) {
    if (response.status === 401) $("key-label").hidden = false;
    throw new Error((await response.json()).error.message);
  }
  const began = performance.now();
  for await (const event of serverEvents(response)) {
    if (event.error) throw new Error(event.error.message);
    const recording = lane.recording;
    if (event.diffusion) recording.push(event.diffusion);
    const choice = event.choices[0];
    if (choice) recording.text += (isRaw ? choice.text : choice.delta.content) || "";
    if (event.usage) recording.usage = { ...event.usage.diffusion, completion_tokens: event.usage.completion_tokens };
    if (event.diffusion || event.usage) show(lane, recording.frames.length - 1, (performance.now() - began) / 1000);
  }
  if (lane.recording.usage === null) throw new Error("the connection ended before the answer did");
  lane.root.querySelector(".answer").textContent = lane.recording.text;
}

// ---- showing ------------------------------------------------------------------------------------------------------

function show(lane, k, seconds) {
  const { recording, root } = lane;
  lane.view.show(recording, k);
  const canvas = root.querySelector(".canvas");
  if (running !== null) canvas.scrollTop = canvas.scrollHeight;
  const isEnd = recording.usage !== null && k === recording.frames.length - 1;
  const decided = recording.numDecided(k);
  const stats = { tokens: decided, edits: recording.frames[k]?.edits ?? 0, forwards: k + 1, tpf: "\u2013", rate: "\u2013", seconds };
  if (k >= 0) stats.tpf = (decided / (k + 1)).toFixed(2);
  if (seconds > 0) stats.rate = Math.round(decided / seconds);
  if (isEnd) {
    const usage = recording.usage;
    Object.assign(stats, {
      tokens: usage.completion_tokens, edits: usage.num_edits, forwards: usage.num_forwards,
      tpf: usage.tpf_total.toFixed(2), rate: Math.round(usage.tokens_per_second), seconds: usage.total_s,
    });
    const effect = Object.entries(usage.settings).map(([key, value]) => `${key} ${JSON.stringify(value)}`);
    root.querySelector(".effect").textContent = effect.join(", ");
  }
  stats.seconds = stats.seconds.toFixed(stats.seconds < 10 ? 3 : 1);
  for (const [name, value] of Object.entries(stats)) root.querySelector(`[data-stat=${name}]`).textContent = value;
}

function makeLanes() {
  $("lanes").replaceChildren();
  lanes = (isRace() ? NAMES : ["A"]).map((name) => {
    const root = $("lane-template").content.firstElementChild.cloneNode(true);
    const settings = readSettings(name);
    root.id = `lane-${name}`;
    root.querySelector("h2").textContent = (isRace() ? `${name}: ` : "") + describe(settings);
    $("lanes").append(root);
    return { name, root, settings, view: new CanvasView(root.querySelector(".canvas")), recording: new Recording() };
  });
}

function verdict() {
  const [a, b] = lanes.map((lane) => lane.recording.usage);
  const [first, second, name] = a.total_s <= b.total_s ? [a, b, "A"] : [b, a, "B"];
  const ratio = (second.total_s / Math.max(first.total_s, 1e-9)).toFixed(2);
  const same = lanes[0].recording.text === lanes[1].recording.text ? "the text is the same" : "the texts differ";
  $("verdict").textContent =
    `${name} was ${ratio}\u00d7 as fast: ${first.num_forwards} forwards against ${second.num_forwards}; ${same}.`;
  $("verdict").hidden = false;
}

// ---- replay -------------------------------------------------------------------------------------------------------
// One answer is replayed by steps; a race by the server's seconds, a thousand marks for the longer one.

const MARKS = 1000;

function raceSeconds() {
  return Math.max(...lanes.map((lane) => lane.recording.secondsAt(lane.recording.frames.length - 1)));
}

function prepareReplay() {
  const isDone = lanes.length > 0 && lanes.every((lane) => lane.recording.usage !== null && lane.recording.frames.length);
  $("scrub").hidden = !isDone;
  if (!isDone) return;
  $("at").max = lanes.length > 1 ? MARKS : lanes[0].recording.frames.length;
  $("at").value = $("at").max;
  seek();
}

function seek() {
  seekTo();
  $("at").setAttribute("aria-valuetext", $("where").textContent);
}

function seekTo() {
  const at = Number($("at").value);
  if (lanes.length > 1) {
    const seconds = (at / MARKS) * raceSeconds();
    for (const lane of lanes) {
      const k = lane.recording.frameAt(seconds + 1e-9);
      show(lane, k, Math.min(seconds, lane.recording.secondsAt(lane.recording.frames.length - 1)));
    }
    $("where").textContent = `${seconds.toFixed(3)} s`;
    return;
  }
  const [lane] = lanes;
  const frame = lane.recording.frames[at - 1];
  show(lane, at - 1, lane.recording.secondsAt(at - 1));
  $("where").textContent = frame ? `block ${frame.block + 1}, step ${frame.step + 1}` : "start";
}

function pause() {
  cancelAnimationFrame(player);
  player = null;
  $("play").textContent = "Play";
}

function play() {
  const range = $("at");
  if (Number(range.value) >= Number(range.max)) range.value = 0;
  // At full speed a race takes its own time, or 2 s if it was shorter; one answer shows 12 steps a second.
  const length = lanes.length > 1 ? Math.max(2, raceSeconds()) : Number(range.max) / 12;
  let exact = Number(range.value);
  let last = performance.now();
  $("play").textContent = "Pause";
  const tick = (now) => {
    exact += ((now - last) / 1000) * (Number(range.max) / length) * Number($("speed").value);
    last = now;
    range.value = Math.floor(exact);
    seek();
    if (exact >= Number(range.max)) pause();
    else player = requestAnimationFrame(tick);
  };
  player = requestAnimationFrame(tick);
}

// ---- the page -----------------------------------------------------------------------------------------------------

async function run() {
  if (running !== null) return;
  pause();
  for (const id of ["problem", "verdict", "scrub"]) $(id).hidden = true;
  makeLanes();
  $("lanes").scrollIntoView({ block: "nearest" });
  $("lanes").setAttribute("aria-busy", "true");
  $("run").disabled = true;
  $("stop").disabled = false;
  try {
    for (const lane of lanes) await ask(lane); // one slot: the race is run in turn and shown together
    if (lanes.length > 1) verdict();
  } catch (error) {
    if (error.name !== "AbortError") {
      $("problem").textContent = error.message;
      $("problem").hidden = false;
    }
  } finally {
    running = null;
    $("lanes").setAttribute("aria-busy", "false");
    $("run").disabled = false;
    $("stop").disabled = true;
    prepareReplay();
    const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (lanes.length > 1 && !$("scrub").hidden && !isCalm) {
      $("at").value = 0;
      play();
    }
  }
}

async function findModel() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) {
      $("key-label").hidden = false;
      $("model").textContent = "this server asks for a key";
      return;
    }
    [model] = (await response.json()).data;
    if (model.diffusion) {
      const { noise, settings } = model.diffusion;
      $("model").textContent = `${model.id} \u00b7 ${noise} noise, canvas of ${settings.canvas_length}, rule ${settings.commit_rule}`;
      return;
    }
    $("model").textContent = `${model.id} is loading\u2026`;
  } catch {
    $("model").textContent = "the server cannot be reached";
  }
  setTimeout(findModel, 1000);
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
}

addSettings("A", {});
addSettings("B", { commit_rule: "steps" });
layOut();
makeLanes();
if ($("prompt").value === "") $("prompt").value = EXAMPLES[0];
$("prompt").select();
findModel();
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("example").addEventListener("click", () => {
  const prompt = $("prompt");
  prompt.value = EXAMPLES[(EXAMPLES.indexOf(prompt.value) + 1) % EXAMPLES.length];
});
$("race").addEventListener("change", () => {
  layOut();
  if (running === null && lanes.every((lane) => lane.recording.usage === null)) makeLanes();
  if (isRace()) $("settings-box").open = true;
});
$("stop").addEventListener("click", () => running?.abort());
$("theme").addEventListener("click", switchTheme);
$("key").addEventListener("change", findModel);
$("at").addEventListener("input", () => {
  pause();
  seek();
});
$("play").addEventListener("click", () => (player === null ? play() : pause()));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  if (event.key === "Escape") running?.abort();
  const isTyping = /^(INPUT|TEXTAREA|SELECT|BUTTON|SUMMARY)$/.test(document.activeElement.tagName);
  if (event.key === " " && !isTyping && !$("scrub").hidden) {
    event.preventDefault();
    $("play").click();
  }
});
