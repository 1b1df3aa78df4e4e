// Tokens of a turn: fetched when asked for, coloured by what is chosen, read by pointer and by keys.
function say(box, token) {
  box.querySelectorAll(".t.at").forEach((each) => each.classList.remove("at"));
  token.classList.add("at");
  const value = box.querySelector("[data-value]");
  if (value) value.textContent = `${token.textContent}  ${token.title}`;
}

function move(box, stream, step) {
  const all = [...stream.querySelectorAll(".t")];
  const now = all.findIndex((each) => each.classList.contains("at"));
  const next = all[Math.min(Math.max(now + step, 0), all.length - 1)];
  if (!next) return;
  say(box, next);
  next.scrollIntoView({ block: "nearest" });
}

function wire(box) {
  const stream = box.querySelector(".stream");
  stream?.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".t");
    if (token) say(box, token);
  });
  stream?.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!step) return;
    move(box, stream, step);
    event.preventDefault();
  });
  box.querySelectorAll("[data-by]").forEach((choice) =>
    choice.addEventListener("click", (event) => {
      event.preventDefault();
      box.className = `tokens by-${choice.dataset.by}`;
      box.querySelectorAll("[data-by]").forEach((each) => {
        each.classList.toggle("chosen", each === choice);
        if (each === choice) each.setAttribute("aria-current", "true");
        else each.removeAttribute("aria-current");
      });
    }),
  );
}

async function open(link) {
  const place = link.closest(".token-box");
  const answer = await fetch(`${link.href}?part=1`, { headers: { accept: "text/html" } });
  if (!answer.ok || answer.redirected) return location.assign(link.href);
  // A template's content runs no script; what it holds was escaped by the server.
  const made = document.createElement("template");
  made.innerHTML = await answer.text();
  const box = made.content.querySelector("[data-tokens]");
  const whole = document.createElement("p");
  const more = link.cloneNode(true);
  more.classList.remove("tokens-link");
  more.textContent = "Tokens on a page of their own";
  whole.append(more);
  place.replaceWith(box, whole);
  wire(box);
  box.querySelector(".stream")?.focus({ preventScroll: true });
}

document.querySelectorAll("[data-tokens]").forEach(wire);
document.addEventListener("click", (event) => {
  const link = event.target.closest("a.tokens-link");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  open(link);
});
