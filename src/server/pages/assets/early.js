// Runs first: requests the data that the view in the URL will need, while the modules load.

(() => {
  const [path] = (location.hash.slice(1) || "/").split("?");
  const link = (attributes) => document.head.append(Object.assign(document.createElement("link"), attributes));
  const answer = (href) => link({ rel: "preload", as: "fetch", crossOrigin: "anonymous", href });
  const files = document.currentScript.src.replace(/[^/]*$/, "");
  const module = (name) => link({ rel: "modulepreload", href: `${files}${name}.js` });
  const pid = /^\/p\/(\d+)$/.exec(path)?.[1];
  if (pid) {
    const one = `api/v1/processes/${pid}`;
    for (const href of [one, "api/v1/agent", `${one}/heap`, `${one}/explain`]) answer(href);
    for (const name of ["process", "facts", "map", "stacks", "time", "chart", "flame"]) module(name);
  } else if (path === "/") {
    answer("api/v1/processes");
  }
})();
