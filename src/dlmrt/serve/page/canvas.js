// One answer as frames of its canvas, and how a frame is shown. No network, no page: app.js has those.
//
// A frame is what the server sends after a denoising step: {block, step, position, tokens, open, changed, confidence}.
// All slots of a frame are answer positions; slot i stands at position + i.

const UNDECIDED = "\u2591";
const SILENT = "\u00b7"; // a decided token without text: an end mark, or part of a character
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;

// What an undecided slot holds, on one line: noise must not break lines.
function noiseText(token) {
  return token.replace(/\s/g, " ").replace(CONTROLS, SILENT).trim() || UNDECIDED;
}

export class Recording {
  constructor() {
    this.frames = [];
    this.usage = null; // usage.diffusion of the finished answer, with its completion_tokens
    this.text = "";
  }

  // Adds derived marks to a frame: per slot "open", "new", "edited" or "kept", and the certainty it was decided with.
  push(frame) {
    const before = this.frames.at(-1);
    const isSameBlock = before !== undefined && before.block === frame.block;
    const open = new Set(frame.open);
    const changed = new Set(frame.changed);
    const wasOpen = (slot) => !isSameBlock || before.marks[slot] === "open";
    frame.marks = frame.tokens.map((_, slot) => {
      if (open.has(slot)) return "open";
      if (wasOpen(slot)) return "new";
      return changed.has(slot) ? "edited" : "kept";
    });
    frame.sure = frame.tokens.map((_, slot) =>
      frame.marks[slot] === "kept" ? before.sure[slot] : frame.confidence[slot]);
    frame.edits = (before?.edits ?? 0) + frame.marks.filter((mark) => mark === "edited").length;
    frame.isLastOfBlock = true;
    if (isSameBlock) before.isLastOfBlock = false;
    this.frames.push(frame);
  }

  // Positions decided after frame k, over all blocks, without those right of the answer's end.
  numDecided(k) {
    if (k < 0) return 0;
    const frame = this.frames[k];
    const inBlock = frame.marks.filter((mark) => mark !== "open").length;
    const decided = frame.position + inBlock;
    return this.usage === null ? decided : Math.min(decided, this.usage.completion_tokens);
  }

  // Seconds after which frame k was there, by the server's clock; steps are taken as equally long.
  secondsAt(k) {
    if (this.usage === null) return 0;
    return this.usage.prefill_s + (this.usage.decode_s * (k + 1)) / this.frames.length;
  }

  frameAt(seconds) {
    let k = -1;
    while (k + 1 < this.frames.length && this.secondsAt(k + 1) <= seconds) k += 1;
    return k;
  }
}

// Shows a recording after its frame k in an element. Elements of unchanged blocks stay as they are.
export class CanvasView {
  constructor(element) {
    this.element = element;
    this.shown = []; // key per block element
  }

  show(recording, k) {
    const frames = recording.frames.slice(0, k + 1);
    const blocks = frames.filter((frame, at) => frame.isLastOfBlock || at === k);
    const isEnd = recording.usage !== null && k === recording.frames.length - 1;
    blocks.forEach((frame, at) => {
      const isCurrent = at === blocks.length - 1 && !isEnd;
      const key = `${frame.block}/${frame.step}/${isCurrent}/${isEnd}`;
      if (this.shown[at] === key) return;
      const block = document.createElement("span");
      block.className = "block";
      block.append(...slotsOf(frame, isCurrent, recording.usage));
      if (at < this.element.children.length) this.element.children[at].replaceWith(block);
      else this.element.append(block);
      this.shown[at] = key;
    });
    while (this.element.children.length > blocks.length) this.element.lastElementChild.remove();
    this.shown.length = blocks.length;
    this.element.setAttribute("aria-label", recording.text || "Canvas");
  }

  clear() {
    this.element.replaceChildren();
    this.shown = [];
  }
}

function slotsOf(frame, isCurrent, usage) {
  return frame.tokens.map((token, slot) => {
    const element = document.createElement("span");
    const mark = frame.marks[slot];
    const isPast = usage !== null && frame.position + slot >= usage.completion_tokens;
    element.className = "slot";
    if (mark === "open") element.classList.add("open");
    else if (isPast) element.classList.add("past");
    else if (isCurrent && mark !== "kept") element.classList.add(mark);
    element.dataset.sure = String(Math.min(4, Math.floor(frame.sure[slot] * 5)));
    element.textContent = mark === "open" ? noiseText(token) : token.replace(CONTROLS, SILENT) || SILENT;
    element.title = `position ${frame.position + slot + 1}: ${(100 * frame.sure[slot]).toFixed(1)} %`;
    return element;
  });
}
