
// The key of this server: asked for where it is needed, kept for this tab alone.

const key = {
  value: sessionStorage.getItem("key") || "",
  listeners: [],
  refused(error) {
    if (error.status === 401) {
      at("key-problem").textContent = key.value ? error.message : "";
      key.ask();
    }
  },
  ask() {
    at("key-form").hidden = false;
  },
  use(value) {
    key.value = value;
    if (value) sessionStorage.setItem("key", value);
    else sessionStorage.removeItem("key");
    at("key").value = "";
    at("key-problem").textContent = "";
    at("key-form").hidden = true;
    for (const listener of key.listeners) listener();
  },
};

at("key-form").addEventListener("submit", (sent) => {
  sent.preventDefault();
  // Headers have room for ASCII only.
  const value = at("key").value.trim();
  if (/^[\x21-\x7e]*$/.test(value)) key.use(value);
  else at("key-problem").textContent = "A key has printable ASCII characters only, and no spaces.";
});
at("forget").addEventListener("click", () => key.use(""));
at("show-key").addEventListener("click", () => {
  at("key-form").hidden = !at("key-form").hidden;
  if (!at("key-form").hidden) at("key").focus();
});
at("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
});
if (localStorage.getItem("theme")) document.documentElement.dataset.theme = localStorage.getItem("theme");
