// Asking before something dangerous, saying what was done, and taking it back where that is possible.

import { field, h, shown, trail } from "./dom.js";

// `undo` is a function that does the opposite and answers with a sentence.
export function toast(text, { kind = "", undo = null } = {}) {
  const shelf = document.getElementById("toasts");
  const close = h("button", { type: "button", class: "quiet small", "aria-label": "Close this note", onclick: () => note.remove() }, "✕");
  const back = undo ? h("button", { type: "button", class: "small" }, "Undo") : null;
  const note = h("div", { class: `toast ${kind}`, role: kind === "bad" ? "alert" : null }, h("span", {}, text), back, close);
  if (back) back.onclick = doing(back, async () => { const said = await undo(); note.remove(); return said; }, (said) => said);
  shelf.append(note);
  if (shelf.showPopover) { if (shelf.matches(":popover-open")) shelf.hidePopover(); shelf.showPopover(); }  // above an open dialog
  let left = kind === "bad" || undo ? 15 : 7;
  const timer = setInterval(() => {
    if (!note.isConnected || (!note.matches(":hover, :focus-within") && (left -= 1) <= 0)) { note.remove(); clearInterval(timer); }
  }, 1000);
}

// Without HTTPS, except on the machine itself, browsers have no clipboard for pages.
export async function copy(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    toast(`Copied ${text}.`);
  } catch {
    getSelection().selectAllChildren(element);
    toast("The browser does not let this page copy. It is marked: press Ctrl+C, or ⌘C.");
  }
}

// Resolves to something true only when the person confirms.  With `typed`, the name has to be typed first; with `reason`,
// the label of a field, the answer has what was written there as its `reason`.
export function confirm({ title, text, action, danger = true, typed = "", reason = "" }) {
  return new Promise((resolve) => {
    const go = h("button", { type: "submit", class: danger ? "danger" : "main", value: "yes", disabled: !!typed }, action);
    const input = typed ? h("input", { "aria-label": `Type ${typed} to confirm`, autocomplete: "off", spellcheck: "false", style: "width:100%", oninput: () => { go.disabled = ![typed, shown(typed)].includes(input.value); } }) : null;
    const told = reason ? h("input", { autocomplete: "off", maxlength: 200 }) : null;
    const stay = h("button", { type: "button", onclick: () => box.close("no") }, "Cancel");
    const box = dialog(title, "", h("form", { method: "dialog" }, h("p", { id: "dialog-text" }, text), input ? [h("p", { class: "soft" }, "Type ", h("b", {}, typed), " to confirm."), input] : null, told ? h("div", { class: "fields" }, field(reason, told, { wide: true })) : null, h("div", { class: "tools end" }, stay, go)));
    box.setAttribute("role", "alertdialog");
    box.setAttribute("aria-describedby", "dialog-text");
    box.addEventListener("close", () => resolve(box.returnValue === "yes" && { reason: told ? told.value.trim() : "" }));
    box.showModal();
    (input || (danger ? stay : go)).focus();
  });
}

// A dialog around a form; `build(close)` returns its content.
export function open(title, build, { large = false } = {}) {
  const box = dialog(title, large ? "large" : "");
  box.append(build(() => box.close()));
  box.showModal();
  box.querySelector("input, select, textarea")?.focus();
  return box;
}

function dialog(title, look, ...content) {
  const box = h("dialog", { class: look, "aria-labelledby": "dialog-title" }, h("h2", { id: "dialog-title" }, title), content);
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  return box;
}

// Runs what a button does: once at a time, with its outcome said.  `done` makes a sentence, or {text, undo}, of what
// the work answers; nothing = it was called off, or there is nothing to say.
export function doing(button, work, done) {
  return async (event) => {
    event?.preventDefault();
    const back = trail(document.getElementById("main"), button);
    button.disabled = true;
    const place = button.closest("dialog");
    place?.querySelector(".problem")?.remove();
    try {
      const outcome = await work();
      const said = outcome === undefined || outcome === null ? null : typeof done === "function" ? done(outcome) : done;
      if (said) toast(said.text || said, { undo: said.undo });
    } catch (error) {
      const text = [error.message, ...(error.suggestions || [])].join(" ");
      if (place?.open) (button.closest(".tools") || button).before(h("div", { class: "notice bad problem", role: "alert" }, text));
      else toast(text, { kind: "bad" });
    } finally {
      button.disabled = false;
      // A button that was disabled cannot get it back itself, and another one may be in its place by now.
      if (document.activeElement === document.body) { if (button.isConnected) button.focus(); else back(); }
    }
  };
}

// A button that asks, does, and says what it did.  What it does is told the reason, if one was asked for.
export function button(label, work, { look = "", ask = null, done = "", title = null } = {}) {
  const made = h("button", { type: "button", class: look, title }, label);
  made.onclick = doing(made, async () => {
    const sure = ask ? await confirm(ask) : { reason: "" };
    if (!sure) return null;
    const outcome = await work(sure.reason);
    return outcome === undefined ? true : outcome;
  }, done);
  return made;
}
