const $ = (id) => document.getElementById(id);
const MODEL = document.body.dataset.model;
const turns = [];
let key = sessionStorage.getItem("key") || "", running = null, chats = true, timer = 0, plan = null;

// -- numbers as people read them ------------------------------------------------------
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return (n < 10 && i ? n.toFixed(2) : n < 100 && i ? n.toFixed(1) : Math.round(n)) + " " + units[i];
}
const count = (n) => Math.round(n).toLocaleString("en-US");
const few = (n) => n >= 1000 ? count(n) : String(Number(n.toPrecision(4)));
const percent = (share) => (100 * share).toFixed(1) + " %";
const removal = (share) => share >= 0 ? percent(share) + " less" : percent(-share) + " more";

// -- the conversation -------------------------------------------------------------------
function headers() {
  const found = { "Content-Type": "application/json" };
  if (key) found.Authorization = "Bearer " + key;
  return found;
}
function below() {
  // Pixels of the conversation under what is seen. On a phone the page itself scrolls.
  const box = $("scroll"), foot = document.querySelector(".foot");
  if (getComputedStyle(box).overflowY !== "visible") return box.scrollHeight - box.scrollTop - box.clientHeight;
  return box.getBoundingClientRect().bottom - foot.getBoundingClientRect().top;
}
function toEnd() {
  $("scroll").scrollTop = $("scroll").scrollHeight;
  if (below() > 0) window.scrollBy(0, below());
}
function scrolled(act) {
  const follows = below() < 60;
  act();
  if (follows) toEnd();
}
function shown(who, text, kind) {
  const body = made("div", text, "body");
  $("empty").hidden = true;
  $("log").append(made("div", undefined, "turn " + kind));
  $("log").lastChild.append(made("span", who, "who"), body);
  toEnd();
  return body;
}
async function refused(response) {
  let said = response.statusText, code = "";
  try { const body = await response.json(); said = body.error.message; code = body.error.code || ""; } catch (error) { /* no JSON */ }
  if (response.status === 401) { $("keyform").hidden = false; $("key").focus(); }
  const error = new Error(said);
  error.code = code;
  return error;
}
async function reached(path, said) {
  try { return await fetch(path, said); } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer");
  }
}
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("the connection broke off: what came is above");
    });
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
function settings() {
  const found = {}, stops = $("stops").value.split("\n").filter((line) => line);
  if ($("temperature").value !== "") found.temperature = Number($("temperature").value);
  if ($("most").value !== "") found.max_tokens = Number($("most").value);
  if (stops.length) found.stop = stops;
  return found;
}
function request() {
  const common = { model: MODEL, stream: true, stream_options: { include_usage: true }, ...settings() };
  if (!chats) return { max_tokens: 256, ...common, prompt: turns[turns.length - 1].content };
  const system = $("system").value.trim();
  return { ...common, messages: system ? [{ role: "system", content: system }, ...turns] : turns };
}
function continues() {
  chats = false;
  $("system").disabled = true;
  $("system").placeholder = "not used: this model has no chat template";
  shown("kvlathe", "This model has no chat template: it continues your text.", "note");
}
async function post(signal) {
  if (chats && plan && !plan.chats) continues();
  const path = chats ? "v1/chat/completions" : "v1/completions";
  const response = await reached(path, { method: "POST", headers: headers(), body: JSON.stringify(request()), signal });
  if (response.ok) return response;
  const error = await refused(response);
  if (!chats || error.code !== "chat_template") throw error;
  continues();
  return post(signal);
}
function busy(is) {
  $("send").disabled = is;
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("stop").disabled = !is;
}
async function answer(text) {
  turns.push({ role: "user", content: text });
  shown("you", text, "user");
  await answered();
}
function thinks(node) {
  const box = made("details", undefined, "thoughts");
  box.append(made("summary", "Thoughts"), made("div", ""));
  node.before(box);
  return box.lastChild;
}
async function answered() {
  const text = turns[turns.length - 1].content;
  for (const old of document.querySelectorAll(".again")) old.remove();
  running = new AbortController();
  const mine = running;
  watchIn(100);
  busy(true);
  $("speed").textContent = "waiting for the first token";
  const sent = performance.now();
  let first = 0, last = 0, pieces = 0, whole = "", thoughts = "", node = null, box = null, drawn = 0, cut = false;
  const draw = () => {
    drawn = 0;
    if (!node) return;
    scrolled(() => {
      node.replaceChildren(chats ? markdown(whole) : whole);
      if (thoughts) (box = box || thinks(node)).textContent = thoughts;
    });
  };
  try {
    const response = await post(mine.signal);
    node = shown(MODEL, "", chats ? "answer" : "answer plain");
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) {
        const seconds = (last - first) / 1000, tokens = chunk.usage.completion_tokens;
        const speed = seconds > 0 ? ` · ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
        $("speed").textContent = `${count(tokens)} tokens${speed} · first after ${((first - sent) / 1000).toFixed(2)} s · prompt ${count(chunk.usage.prompt_tokens)} tokens`;
      }
      for (const choice of chunk.choices) {
        const piece = (chats ? choice.delta.content : choice.text) || "", thought = (chats && choice.delta.reasoning_content) || "";
        cut = cut || choice.finish_reason === "length";
        if (!piece && !thought) continue;
        last = performance.now();
        first = first || last;
        pieces++;
        whole += piece;
        thoughts += thought;
        drawn = drawn || setTimeout(draw, whole.length > 20000 ? 400 : 40);
        if (last > first) $("speed").textContent = `about ${(1000 * pieces / (last - first)).toFixed(1)} pieces/s`;
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") shown("error", error.message, "failed");
    if (mine === running) $("speed").textContent = error.name === "AbortError" ? "stopped" : "";
  }
  clearTimeout(drawn);
  draw();
  if (mine !== running) return;
  if (cut) shown("kvlathe", "The answer was cut at its most tokens.", "note");
  running = null;
  busy(false);
  if (node) again(node.parentNode, whole);
  else unsaid(text);
  watchIn(0);
}

function again(turn, whole) {
  // Below an answer: the same question once more, in the place of what it got.
  const button = made("button", "Regenerate", "again"), before = turns.slice();
  button.type = "button";
  if (whole) turns.push({ role: "assistant", content: whole });
  else turns.pop();
  button.addEventListener("click", () => {
    if (running) return;
    turns.splice(0, turns.length, ...before);
    while (turn.nextSibling) turn.nextSibling.remove();
    turn.remove();
    answered();
  });
  scrolled(() => $("log").append(button));
}
function unsaid(text) {
  // A question that got nothing goes back, to be sent again.
  turns.pop();
  if (!$("text").value) { $("text").value = text; sized(); }
}

// -- the plan -----------------------------------------------------------------------------
function row(list, name, value, title) {
  const term = made("dt", name), said = made("dd", value);
  if (title) said.title = title;
  list.append(term, said);
}
function drawPlan() {
  const longest = plan.lengths[plan.lengths.length - 1], list = $("facts");
  $("removed").textContent = removal(longest.removed);
  $("removed").classList.toggle("plain", longest.removed <= 0);
  $("length").textContent = `at ${count(longest.tokens)} tokens, beside ${plan.bits} bit uncompressed`;
  list.replaceChildren();
  row(list, "method", plan.compression);
  for (const at of plan.lengths.slice(0, -1).reverse()) row(list, `at ${count(at.tokens)} tokens`, removal(at.removed));
  row(list, "bytes a token", `${few(longest.bytes_per_token)} of ${few(plan.uncompressed_per_token)}`, `at ${count(longest.tokens)} tokens; uncompressed in ${plan.bits} bit`);
  row(list, "context", `${count(plan.context)} tokens`);
  row(list, "runs at once", `${count(plan.most_running)} requests`);
  if (plan.lost) {
    const where = `measured by the build ${plan.lost.where}`;
    row(list, "KL, nats a token", few(plan.lost.kl), where);
    row(list, "same next token", percent(plan.lost.same_token), where);
    row(list, "perplexity", "x" + few(plan.lost.perplexity_ratio), where);
  }
  $("warning").hidden = !(plan.lost && plan.lost.warning);
  $("warning").textContent = plan.lost ? plan.lost.warning : "";
  drawHolds();
  drawCurve();
  if (!plan.chats) $("text").placeholder = "Text to continue";
}
function bar(name, value, share, kind, title) {
  const track = made("div", undefined, "track"), fill = made("i", undefined, kind);
  fill.style.width = Math.max(0.5, 100 * Math.min(1, share)) + "%";
  track.append(fill);
  const whole = made("div", undefined, "bar");
  whole.append(made("span", name, "name"), track, made("span", value, "amount"));
  whole.title = title;
  return whole;
}
function drawHolds() {
  const box = $("holds");
  $("full").textContent = bytes(plan.cache_bytes);
  box.replaceChildren();
  for (const at of plan.lengths) {
    const most = Math.max(at.sequences, at.sequences_uncompressed, 1), what = `sequences of ${count(at.tokens)} tokens in ${bytes(plan.cache_bytes)}`;
    box.append(
      made("p", `sequences of ${count(at.tokens)} tokens`, "of"),
      bar("here", count(at.sequences), at.sequences / most, "own", `${count(at.sequences)} ${what}`),
      bar("uncompressed", count(at.sequences_uncompressed), at.sequences_uncompressed / most, "other", `uncompressed in ${plan.bits} bit: ${count(at.sequences_uncompressed)} ${what}`),
    );
  }
}
const WIDE = 320, HIGH = 120;
function place(tokens, size) {
  const most = Math.max(...plan.curve.map((point) => Math.max(point.uncompressed, point.bytes)), 1);
  return [WIDE * tokens / plan.context, HIGH - (HIGH - 4) * size / most];
}
function drawCurve() {
  for (const [id, name] of [["own", "bytes"], ["plain", "uncompressed"]]) {
    const points = plan.curve.map((point) => place(point.tokens, point[name]).map((x) => x.toFixed(1)).join(","));
    $("line-" + id).setAttribute("points", points.join(" "));
    if (id === "own") $("area").setAttribute("points", `0,${HIGH} ${points.join(" ")} ${WIDE},${HIGH}`);
  }
  $("axis").textContent = `${count(plan.context)} tokens`;
  readCurve(null);
}
function near(tokens) {
  return plan.curve.reduce((best, point) => Math.abs(point.tokens - tokens) < Math.abs(best.tokens - tokens) ? point : best);
}
function readCurve(tokens) {
  const point = near(tokens === null ? plan.context : tokens), x = place(point.tokens, 0)[0];
  $("cursor").setAttribute("d", tokens === null ? "" : `M${x.toFixed(1)} 0V${HIGH}`);
  const less = point.uncompressed ? removal(1 - point.bytes / point.uncompressed) : "";
  $("at").textContent = `${count(point.tokens)} tokens: ${bytes(point.bytes)} of ${bytes(point.uncompressed)}${less && ", " + less}`;
}

// -- the cache now --------------------------------------------------------------------------
function drawHeads(view) {
  const layers = new Map();
  for (const head of view.heads) {
    if (!layers.has(head.layer)) layers.set(head.layer, []);
    layers.get(head.layer).push(head);
  }
  const most = Math.max(...[...layers.values()].map((row) => row.length)), grid = $("heads");
  const idle = !(view.running_bytes + view.kept_bytes);
  grid.style.gridTemplateColumns = `auto repeat(${most}, minmax(${most > 8 ? 10 : 22}px, 1fr)) auto`;
  grid.replaceChildren();
  const top = made("div", made("b", "layer"));
  for (let i = 0; i < most; i++) top.append(made("b", most > 12 ? "" : `head ${i}`, "head"));
  top.append(made("i", idle ? "bytes a token" : "now"));
  grid.append(top);
  for (const [layer, heads] of layers) {
    const line = made("div", made("b", String(layer)));
    let now = 0, long = 0;
    for (let i = 0; i < most; i++) {
      const cell = document.createElement("span"), head = heads[i];
      if (head) {
        now += head.now;
        long += head.per_token;
        const share = view.uncompressed_per_token ? head.per_token / view.uncompressed_per_token : 1;
        cell.style.setProperty("--share", Math.min(100, 100 * share).toFixed(1) + "%");
        cell.title = `layer ${layer}, head ${head.head}: ${head.per_token.toFixed(1)} of ${view.uncompressed_per_token.toFixed(0)} bytes a token (${percent(share)}); ${bytes(head.now)} now`;
        cell.setAttribute("role", "img");
        cell.setAttribute("aria-label", cell.title);
        if (most <= 4) cell.textContent = Math.round(100 * share) + " %";
      } else cell.style.visibility = "hidden";
      line.append(cell);
    }
    line.append(made("i", idle ? (long < 1000 ? long.toFixed(1) : count(long)) : bytes(now)));
    grid.append(line);
  }
}
function drawNow(view) {
  const used = view.running_bytes + view.kept_bytes, total = view.total_bytes || 1;
  $("requests").textContent = `${view.running} running${view.waiting ? `, ${view.waiting} waiting` : ""}`;
  $("tokens").textContent = count(view.running_tokens);
  $("running").textContent = bytes(view.running_bytes);
  $("plain").textContent = view.running_uncompressed || !view.running ? bytes(view.running_uncompressed) : "not known";
  $("kept").textContent = bytes(view.kept_bytes);
  $("share").textContent = `${percent(used / total)} of ${bytes(total)}`;
  $("fill-running").style.width = 100 * view.running_bytes / total + "%";
  $("fill-kept").style.width = 100 * view.kept_bytes / total + "%";
  $("fill").title = `${bytes(view.running_bytes)} of running answers, ${bytes(view.kept_bytes)} kept, of ${bytes(total)}`;
  const one = view.running ? view.running_tokens / view.running : 0, dot = $("dot");
  dot.hidden = !(one && plan);
  if (one && plan) {
    const [x, y] = place(Math.min(one, plan.context), near(one).bytes);
    dot.style.left = 100 * x / WIDE + "%";
    dot.style.top = 100 * y / HIGH + "%";
  }
  drawHeads(view);
}
function watchIn(milliseconds) {
  clearTimeout(timer);
  timer = setTimeout(watch, milliseconds);
}
async function asked(path) {
  const response = await reached(path, { headers: headers() });
  if (!response.ok) throw await refused(response);
  return response.json();
}
async function watch() {
  if (!document.hidden) {
    try {
      if (!plan) { plan = await asked("v1/plan"); drawPlan(); }
      drawNow(await asked("v1/cache"));
    } catch (error) { $("requests").textContent = error.message; }
  }
  watchIn(running ? 400 : 2000);
}

// -- what a user does --------------------------------------------------------------------
function sized() {
  $("text").style.height = "auto";
  $("text").style.height = Math.min(220, $("text").scrollHeight + 2) + "px";
}
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  sized();
  answer(text);
});
$("text").addEventListener("input", sized);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("opens").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  $("opens").setAttribute("aria-expanded", String(!$("settings").hidden));
});
$("stop").addEventListener("click", () => running && running.abort());
$("anew").addEventListener("click", () => {
  if (running) running.abort();
  running = null;
  busy(false);
  turns.length = 0;
  $("log").replaceChildren();
  $("empty").hidden = false;
  $("speed").textContent = "";
  $("text").focus();
});
for (const button of document.querySelectorAll("#starts button")) {
  button.addEventListener("click", () => { $("text").value = button.textContent; sized(); $("text").focus(); });
}
$("keyform").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("key", key);
  $("keyform").hidden = true;
  watchIn(0);
});
$("curve").addEventListener("pointermove", (event) => {
  const box = $("curve").getBoundingClientRect();
  if (plan) readCurve(plan.context * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
});
$("curve").addEventListener("pointerleave", () => plan && readCurve(null));
watch();
