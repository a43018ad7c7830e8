"use strict";
// Live parts of a page, logs that grow, and the text of a chart's marks. Nothing here makes HTML from data:
// fragments are escaped by the server, and logs are added as text.

const connection = document.getElementById("connection");

function tell(state) {
  document.body.dataset.connection = state;
  if (connection && connection.textContent !== state) connection.textContent = state;
}

function replaceFragment(id, html) {
  const element = document.getElementById(id);
  if (!element) return;
  const focused = element.contains(document.activeElement) ? document.activeElement.id : "";
  element.innerHTML = html;
  const again = focused && document.getElementById(focused);
  if (again) again.focus({ preventScroll: true });
}

// The browser reconnects after a broken connection, but gives up after an answer that is an error.
function follow(url, handle) {
  let source;
  const connect = () => {
    source = new EventSource(url);
    source.onopen = () => tell("live");
    source.onmessage = (event) => {
      tell("live");
      handle(JSON.parse(event.data), event.lastEventId);
    };
    source.onerror = () => {
      tell("reconnecting…");
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
    };
  };
  connect();
  window.addEventListener("pagehide", () => source.close());
}

const LOG_LETTERS = 1 << 20;

function followLog(url) {
  const log = document.getElementById("log");
  log.scrollTop = log.scrollHeight;
  follow(url, ({ text }) => {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    log.append(text);
    if (log.textContent.length > LOG_LETTERS) {
      log.textContent = log.textContent.slice(-LOG_LETTERS / 2);
    }
    if (atEnd) log.scrollTop = log.scrollHeight;
  });
}

function showMarks() {
  const readout = document.getElementById("readout");
  if (!readout) return;
  const show = (event) => {
    const mark = event.target.closest && event.target.closest(".mark");
    if (mark) readout.textContent = mark.getAttribute("aria-label");
  };
  document.addEventListener("focusin", show);
  document.addEventListener("pointerover", show);
}

// A link that the server printed carries the token behind the #, which browsers never send.
function signIn() {
  const form = document.getElementById("sign-in");
  const token = decodeURIComponent(window.location.hash.slice(1));
  if (!form || !token.startsWith("tf_")) return;
  history.replaceState(null, "", window.location.pathname);
  form.elements.token.value = token;
  form.submit();
}

signIn();
showMarks();
if (document.body.dataset.live) {
  follow(document.body.dataset.live, (fragments) => {
    for (const [id, html] of Object.entries(fragments)) replaceFragment(id, html);
  });
}
if (document.body.dataset.log) followLog(document.body.dataset.log);
