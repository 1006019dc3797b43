// The page at GET /: asks this server's own API, shows each token as it arrives. No library, nothing from elsewhere.

const $ = (id) => document.getElementById(id);
const LIMITS = [0.5, 0.2, 0.05, 0.01]; // from here down to the next is one colour; the legend says them
let stopper = null; // aborts the request that runs
let record = null; // what "Copy as JSON" copies

// ------------------------------------------------------------ tokens

const probability = (logprob) => (logprob === null ? null : Math.exp(logprob));
const percent = (p) => (p === null ? "–" : p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : p >= 0.001 ? `${(100 * p).toPrecision(2)} %` : `${(100 * p).toExponential(1)} %`);
const sum = (tokens) => tokens.reduce((total, token) => total + (token.logprob ?? 0), 0);

function visible(text) { // for the small panel, where a line break can't be one
  return text === "" ? "(part of a character)" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

function makeToken(token) {
  const span = document.createElement("span");
  const p = probability(token.logprob);
  const step = p === null ? -1 : LIMITS.findIndex((limit) => p >= limit);
  span.className = "token " + (p === null ? "unscored" : `p${step < 0 ? LIMITS.length : step}`);
  if (p !== null && p < LIMITS.at(-1)) span.classList.add("surprising");
  if (token.text === "") {
    span.classList.add("sign");
    span.textContent = "·";
  } else if (token.text.includes("\n")) { // shown as a sign and a break
    token.text.split("\n").forEach((part, i) => {
      if (i > 0) {
        const sign = document.createElement("span");
        sign.className = "sign";
        sign.textContent = "⏎";
        span.append(sign, "\n");
      }
      span.append(part);
    });
  } else {
    span.textContent = token.text;
  }
  span.tabIndex = -1;
  span.setAttribute("role", "button");
  const spoken = p === null ? "not scored" : `${percent(p)}${p < LIMITS.at(-1) ? ", a surprise" : ""}`;
  span.setAttribute("aria-label", `${visible(token.text)}, ${spoken}`);
  span.token = token;
  return span;
}

function appendTokens(box, tokens) {
  const hadNone = !box.firstChild;
  box.append(...tokens.map(makeToken));
  if (hadNone && box.firstChild) box.firstChild.tabIndex = 0; // Tab enters a text at one token
}

// ------------------------------------------------------------ details of a token

function showDetails(span) {
  hideDetails();
  const { token } = span;
  const panel = $("details");
  const title = document.createElement("p");
  const name = document.createElement("code");
  name.textContent = visible(token.text);
  const rank = token.rank === null ? "" : ` · rank ${token.rank}`;
  title.append(name, token.logprob === null
    ? " is the first token: nothing stands before it"
    : ` ${percent(probability(token.logprob))} · logprob ${token.logprob.toFixed(4)}${rank}`);
  panel.replaceChildren(title);
  if (token.top.length) panel.append(makeTable(token));
  panel.hidden = false;
  span.classList.add("shown");
  span.setAttribute("aria-describedby", "details");
  const at = span.getClientRects()[0], width = panel.offsetWidth, height = panel.offsetHeight;
  const below = at.bottom + 6 + height <= innerHeight || at.top < height + 12;
  panel.style.left = `${scrollX + Math.max(8, Math.min(at.left, innerWidth - width - 16))}px`;
  panel.style.top = `${scrollY + (below ? at.bottom + 6 : at.top - height - 6)}px`;
}

function makeTable(token) {
  const table = document.createElement("table");
  table.insertRow().innerHTML = "<th>rank</th><th>token</th><th>probability</th><th>logprob</th><th></th>";
  for (const entry of token.top) {
    const row = table.insertRow(), p = probability(entry.logprob);
    row.className = entry.isChosen ? "chosen" : "";
    for (const text of [entry.rank, visible(entry.text), percent(p), entry.logprob.toFixed(3)]) row.insertCell().textContent = text;
    const bar = document.createElement("span"), fill = document.createElement("span");
    bar.className = "bar";
    fill.style.width = `${Math.max(1, 100 * p)}%`;
    bar.append(fill);
    row.insertCell().append(bar);
  }
  return table;
}

function hideDetails() {
  $("details").hidden = true;
  for (const span of document.querySelectorAll(".token.shown")) {
    span.classList.remove("shown");
    span.removeAttribute("aria-describedby");
  }
}

function moveFocus(span, key) {
  const all = [...span.parentElement.children], at = all.indexOf(span);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[key];
  if (next === undefined || !all[next]) return false;
  span.tabIndex = -1;
  all[next].tabIndex = 0;
  all[next].focus();
  return true;
}

const tokenOf = (event) => event.target.closest?.(".tokens .token");
document.addEventListener("pointerover", (event) => { const span = tokenOf(event); if (span) showDetails(span); });
document.addEventListener("pointerout", (event) => { if (tokenOf(event)) hideDetails(); });
document.addEventListener("focusin", (event) => { const span = tokenOf(event); if (span) showDetails(span); else hideDetails(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { hideDetails(); stopper?.abort(); return; }
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); $("form").requestSubmit(); return; }
  const span = tokenOf(event);
  if (span && moveFocus(span, event.key)) event.preventDefault();
});

// ------------------------------------------------------------ the API

const headers = () => ({ "Content-Type": "application/json", ...($("key").value && { Authorization: `Bearer ${$("key").value}` }) });

async function call(path, body, signal) {
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers: headers(), body: body && JSON.stringify(body), signal });
  if (answer.ok) return answer;
  if (answer.status === 401) {
    $("key_field").hidden = false;
    $("key").focus();
    throw new Error("this server wants an API key");
  }
  const said = await answer.json().catch(() => null);
  throw new Error(said?.error?.message ?? `the server answered ${answer.status}`);
}

async function* readEvents(answer) { // server-sent events: one line of data each
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function makeRequest(mode) {
  const top = Number($("top").value);
  const body = { model: $("model").value, temperature: Number($("temperature").value), n: Number($("n").value), stream: true,
    max_tokens: Number($("max_tokens").value), prompt_logprobs: top, return_token_ids: true, stream_options: { include_usage: true } };
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  if (mode === "chat") return { ...body, messages: [{ role: "user", content: $("prompt").value }], logprobs: true, top_logprobs: top };
  if (mode === "score") Object.assign(body, { max_tokens: 0, n: 1 });
  return { ...body, prompt: $("prompt").value, logprobs: top };
}

async function readPrompt(ids, scores) {
  const [first] = ids.length ? [(await (await call("detokenize", { model: $("model").value, tokens: ids.slice(0, 1) })).json()).prompt] : [];
  return ids.map((id, i) => {
    const entries = scores[i];
    if (!entries) return { id, text: i === 0 ? first : "", logprob: null, rank: null, top: [] };
    const own = entries[id];
    const top = Object.entries(entries).map(([other, entry]) => ({ text: entry.decoded_token, logprob: entry.logprob, rank: entry.rank, isChosen: Number(other) === id }));
    return { id, text: own.decoded_token, logprob: own.logprob, rank: own.rank, top: top.sort((a, b) => a.rank - b.rank) };
  });
}

// Both forms of a choice's logprobs as tokens. The rank of a token below the alternatives isn't in the answer.
function readTokens(logprobs, ids) {
  const make = (text, logprob, top, id) => {
    const entries = top.map(([other, value], i) => ({ text: other, logprob: value, rank: i + 1, isChosen: other === text }));
    const at = entries.findIndex((entry) => entry.isChosen);
    if (at >= Number($("top").value)) entries[at].rank = `> ${at}`;
    return { id, text, logprob, rank: at < 0 ? `> ${entries.length}` : entries[at].rank, top: entries };
  };
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map((entry, i) => make(entry.token, entry.logprob, entry.top_logprobs.map((top) => [top.token, top.logprob]), ids?.[i]));
  return logprobs.tokens.map((text, i) => make(text, logprobs.token_logprobs[i], ranked(logprobs.top_logprobs?.[i], text), ids?.[i]));
}

function ranked(top, chosen) { // a map in no order: falling, the chosen one last among equals (it may be the extra entry)
  return Object.entries(top ?? {}).sort((a, b) => b[1] - a[1] || (a[0] === chosen) - (b[0] === chosen));
}

// ------------------------------------------------------------ a run

function startChoices(n) {
  return Array.from({ length: n }, (_, index) => {
    const card = document.createElement("article"), title = document.createElement("h2"), facts = document.createElement("small");
    const box = document.createElement("div");
    card.className = "choice";
    box.className = "tokens";
    title.append(`Choice ${index} `, facts);
    card.append(title, box);
    $("choices").append(card);
    return { facts, box, index, tokens: [], finish_reason: null };
  });
}

function showFacts(choice) {
  const total = sum(choice.tokens), count = choice.tokens.length;
  choice.facts.textContent = `Σ logprob ${total.toFixed(3)} · ${count} token${count === 1 ? "" : "s"} · mean ${count ? (total / count).toFixed(3) : "–"}${choice.finish_reason ? ` · ended by ${choice.finish_reason}` : ""}`;
}

async function showPrompt(ids, scores) {
  record.prompt = await readPrompt(ids, scores);
  $("prompt_part").hidden = false;
  const total = sum(record.prompt), scored = record.prompt.filter((token) => token.logprob !== null).length;
  $("prompt_sum").textContent = `Σ logprob ${total.toFixed(3)} · ${ids.length} tokens${scored ? ` · perplexity ${Math.exp(-total / scored).toFixed(2)}` : ""}`;
  appendTokens($("prompt_tokens"), record.prompt);
}

async function run() {
  const mode = $("mode").value, body = makeRequest(mode);
  hideDetails();
  $("prompt_tokens").replaceChildren();
  $("choices").replaceChildren();
  $("prompt_part").hidden = true;
  const choices = mode === "score" ? [] : startChoices(body.n);
  record = { request: body, prompt: [], choices };
  const answer = await call(mode === "chat" ? "v1/chat/completions" : "v1/completions", body, stopper.signal);
  let promptIds = null;
  for await (const event of readEvents(answer)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) record.usage = event.usage;
    for (const part of event.choices ?? []) {
      const choice = choices[part.index];
      promptIds ??= event.prompt_token_ids ?? part.prompt_token_ids ?? null;
      const scores = event.prompt_logprobs ?? part.prompt_logprobs;
      if (scores && promptIds && !record.prompt.length) await showPrompt(promptIds, scores);
      if (!choice) continue;
      const tokens = readTokens(part.logprobs, part.token_ids);
      choice.tokens.push(...tokens);
      choice.finish_reason = part.finish_reason ?? choice.finish_reason;
      appendTokens(choice.box, tokens);
      showFacts(choice);
    }
  }
}

function say(text, isError = false) {
  $("status").textContent = text;
  $("status").className = isError ? "error" : "";
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  stopper?.abort();
  const own = (stopper = new AbortController());
  $("stop").disabled = false;
  $("copy").disabled = true;
  say("running…");
  const began = performance.now();
  try {
    await run();
    const { usage } = record, seconds = (performance.now() - began) / 1000;
    say(`${usage ? `${usage.prompt_tokens} prompt and ${usage.completion_tokens} new tokens, ` : ""}${seconds.toFixed(2)} s`);
  } catch (error) {
    if (own !== stopper) return; // another run has taken its place
    say(own.signal.aborted ? "stopped" : error.message, !own.signal.aborted);
  }
  stopper = null;
  $("stop").disabled = true;
  $("hint").hidden = false;
  $("copy").disabled = !record;
});
$("stop").addEventListener("click", () => stopper?.abort());
$("copy").addEventListener("click", async () => {
  const { request, prompt, choices, usage } = record;
  const text = JSON.stringify({ request, prompt, choices: choices.map(({ index, tokens, finish_reason }) =>
    ({ index, cumulative_logprob: sum(tokens), finish_reason, tokens })), usage }, null, 1);
  await navigator.clipboard.writeText(text).then(() => say("copied"), () => say("the browser did not let this page copy", true));
});

async function listModels() {
  const { data } = await (await call("v1/models")).json();
  $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
}
$("key").addEventListener("change", () => listModels().then(() => say(""), (error) => say(error.message, true)));
listModels().catch((error) => say(error.message, true));
