"use strict";
// Before anything is drawn: the theme chosen last time; without one, the system's.
const themes = {
  get() {
    try { return localStorage.getItem("theme") || "auto"; } catch { return "auto"; }
  },
  set(name) {
    if (name === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.dataset.theme = name;
    // storage may be refused for files; the choice then lasts as long as the page
    try { localStorage.setItem("theme", name); } catch { /* as said */ }
  },
};
themes.set(themes.get());
