// A link from another site opens this page although there is a session: the browser withholds
// its cookie there (SameSite=Strict), and sends it with what the page itself asks for.
const form = document.querySelector("form[data-onward]");
const answer = await fetch("/ui/session", { redirect: "error", headers: { accept: "text/plain" } }).catch(() => null);
if (form && answer && answer.status === 204) location.replace(form.dataset.onward);
