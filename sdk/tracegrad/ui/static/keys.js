// Keys: j and k walk through rows or turns, Enter opens, elements with data-key have their own.
const items = () => [...document.querySelectorAll("[data-rows] tbody tr, [data-turn]")];
let at = -1;

// WCAG 2.1.4: who speaks to the computer, or touches keys by accident, turns them off. A browser
// that lets a page store nothing has them on.
const REMEMBERED = "tracegrad-keys";
let on = true;
try {
  on = localStorage.getItem(REMEMBERED) !== "off";
} catch {}

function wireSwitch(box) {
  box.checked = on;
  box.addEventListener("change", () => {
    on = box.checked;
    try {
      localStorage.setItem(REMEMBERED, on ? "on" : "off");
    } catch {}
  });
}

function go(step) {
  const all = items();
  if (!all.length) return;
  if (at < 0 && location.hash) at = all.findIndex((each) => `#${each.id}` === location.hash);
  at = Math.min(Math.max(at + step, 0), all.length - 1);
  all.forEach((each, n) => each.classList.toggle("current", n === at));
  const target = all[at].querySelector("a, [tabindex]") ?? all[at];
  target.focus({ preventScroll: true });
  all[at].scrollIntoView({ block: all[at].dataset.turn === undefined ? "nearest" : "start" });
}

function help() {
  const dialog = document.getElementById("help");
  if (dialog && !dialog.open) dialog.showModal();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const inField = event.target.closest?.("input, select, textarea, dialog");
  if (inField) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (!on) return;
  if (event.key === "j") go(1);
  else if (event.key === "k") go(-1);
  else if (event.key === "?") help();
  else if (event.key === "t") items()[at]?.querySelector("a.tokens-link")?.click();
  else {
    const element = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    if (!element) return;
    if (element.tagName === "INPUT") element.focus();
    else element.click();
  }
  event.preventDefault();
}

document.querySelectorAll("[data-keys-switch]").forEach(wireSwitch);
document.querySelectorAll("[data-help]").forEach((button) => {
  button.hidden = false;
  button.addEventListener("click", help);
});
document.addEventListener("keydown", pressed);
