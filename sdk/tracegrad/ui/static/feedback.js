// Two buttons for an application's own page, which say what somebody thinks of an answer:
//
//   <script type="module" src="https://proxy.example/ui/feedback.js"></script>
//   <tracegrad-feedback response-id="chatcmpl-…"></tracegrad-feedback>
//
// It posts to /api/feedback of the proxy that it came from, or to `endpoint`. docs/proxy.md has
// all attributes. An element without dependencies, which leaves the page's own styles alone.

const RETRIES = 2;
const STYLES = `
  :host { display: inline-flex; gap: .25rem; align-items: center; font: inherit; }
  button { font: inherit; line-height: 1; padding: .35em .55em; border: 1px solid transparent; border-radius: .4em;
    background: none; color: inherit; cursor: pointer; opacity: .7; min-width: 24px; min-height: 24px; }
  button:hover, button:focus-visible { opacity: 1; border-color: currentcolor; }
  button[aria-pressed="true"] { opacity: 1; border-color: currentcolor; background: color-mix(in srgb, currentcolor 15%, transparent); }
  button:disabled { cursor: progress; }
  svg { width: 1.1em; height: 1.1em; display: block; fill: none; stroke: currentcolor; stroke-width: 2; }
  [role="status"] { font-size: .85em; }
`;
const UP = "M7 10v11M2 10h5v11H2zM7 10l4-8c2 0 3 1 3 3l-1 5h7c1 0 2 1 2 2l-2 8c0 1-1 1-2 1H7";
const DOWN = "M17 14V3M22 14h-5V3h5zM17 14l-4 8c-2 0-3-1-3-3l1-5H4c-1 0-2-1-2-2l2-8c0-1 1-1 2-1h11";

function randomKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

class TracegradFeedback extends HTMLElement {
  #given = null; // "up", "down" or null
  #buttons = {};
  #status;

  connectedCallback() {
    if (this.shadowRoot) return;
    const root = this.attachShadow({ mode: "open" });
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(STYLES);
    root.adoptedStyleSheets = [sheet];
    root.append(
      this.#button("up", UP, this.getAttribute("label-up") ?? "Good answer"),
      this.#button("down", DOWN, this.getAttribute("label-down") ?? "Bad answer"),
    );
    this.#status = document.createElement("span");
    this.#status.setAttribute("role", "status");
    root.append(this.#status);
  }

  #button(thumbs, shape, label) {
    const button = document.createElement("button");
    button.type = "button";
    button.title = label;
    button.setAttribute("aria-label", label);
    button.setAttribute("aria-pressed", "false");
    const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    picture.setAttribute("viewBox", "0 0 24 24");
    picture.setAttribute("aria-hidden", "true");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", shape);
    picture.append(path);
    button.append(picture);
    button.addEventListener("click", () => this.#give(thumbs));
    this.#buttons[thumbs] = button;
    return button;
  }

  async #give(thumbs) {
    // The same button again takes back what was said: it is unknown, not bad.
    const next = this.#given === thumbs ? null : thumbs;
    this.#disable(true);
    try {
      await this.#send(next === null ? { withdraw: true } : { thumbs: next });
      this.#given = next;
      for (const [name, button] of Object.entries(this.#buttons)) {
        button.setAttribute("aria-pressed", String(name === next));
      }
      this.#status.textContent = "";
      this.#tell({ thumbs: next });
    } catch (error) {
      this.#status.textContent = this.getAttribute("label-failed") ?? "Not sent";
      this.#tell({ thumbs: next, error: String(error.message) });
    } finally {
      this.#disable(false);
    }
  }

  #disable(on) {
    for (const button of Object.values(this.#buttons)) button.disabled = on;
  }

  #tell(detail) {
    this.dispatchEvent(new CustomEvent("tracegrad-feedback", { detail, bubbles: true, composed: true }));
  }

  #subject() {
    const found = {};
    for (const name of ["response-id", "rollout-id", "scope", "name"]) {
      if (this.hasAttribute(name)) found[name.replace("-", "_")] = this.getAttribute(name);
    }
    if (this.hasAttribute("turn")) found.turn = Number(this.getAttribute("turn"));
    return found;
  }

  async #send(said) {
    const endpoint = this.getAttribute("endpoint") ?? new URL("/api/feedback", import.meta.url);
    // One key for all attempts: what arrived twice counts once.
    const headers = { "content-type": "application/json", "idempotency-key": randomKey() };
    if (this.hasAttribute("key")) headers.authorization = `Bearer ${this.getAttribute("key")}`;
    const body = JSON.stringify({ ...this.#subject(), ...said });
    for (let attempt = 0; ; attempt++) {
      try {
        const answer = await fetch(endpoint, { method: "POST", headers, body });
        if (answer.ok) return;
        if (answer.status < 500 || attempt >= RETRIES) throw new Refused(await message(answer));
      } catch (error) {
        if (error instanceof Refused || attempt >= RETRIES) throw error;
      }
      await new Promise((resolve) => setTimeout(resolve, 500 * 2 ** attempt));
    }
  }
}

class Refused extends Error {}

async function message(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `HTTP ${answer.status}`;
  }
}

if (!customElements.get("tracegrad-feedback")) customElements.define("tracegrad-feedback", TracegradFeedback);
