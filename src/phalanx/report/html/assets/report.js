// On paper nothing can be opened: tables that fit stand below their pictures.
"use strict";
(() => {
  const opened = [];
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details:not([open])")) {
      if (details.querySelectorAll("tr").length <= 40) { details.open = true; opened.push(details); }
    }
  });
  addEventListener("afterprint", () => { for (const details of opened.splice(0)) details.open = false; });
})();
