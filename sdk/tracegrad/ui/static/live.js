// "3 new": counted by the server, shown when asked for. The list itself stays as it is.
const news = document.getElementById("news");

if (news && news.dataset.live) {
  let source = null;
  const open = () => {
    source = new EventSource(news.dataset.live);
    source.addEventListener("new", (message) => {
      const count = Number(message.data);
      if (count >= 100) {
        // More are not counted: there is nothing further to ask for.
        source.close();
        document.removeEventListener("visibilitychange", follow);
      }
      news.hidden = !(count > 0);
      news.textContent = count > 0 ? `${count >= 100 ? "100+" : count} new` : "";
      document.title = document.title.replace(/^\(\d+\+?\) /, "");
      if (count > 0) document.title = `(${count}) ${document.title}`;
    });
  };
  const follow = () => {
    if (document.hidden) {
      source?.close();
      source = null;
    } else if (!source) {
      open();
    }
  };
  document.addEventListener("visibilitychange", follow);
  follow();
}
