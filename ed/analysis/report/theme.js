"use strict";
// Runs before the first paint: applies the saved theme, or else the system's.
const themes = {
  get() {
    try { return localStorage.getItem("theme") || "auto"; } catch { return "auto"; }
  },
  set(name) {
    if (name === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.dataset.theme = name;
    // browsers may block storage for local files; the choice then lasts until the page is closed
    try { localStorage.setItem("theme", name); } catch { /* not saved */ }
  },
};
themes.set(themes.get());
