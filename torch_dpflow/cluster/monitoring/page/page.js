// The live page: receives updates and shows them. It asks for nothing but them, and changes nothing.

import { Charts, Colours, clock, percent, plain } from "./charts.js";

const MAX_POINTS = 600;
const MAX_EVENTS = 200;
const MAX_SERIES = 64;
const SILENCE_MS = 10000;
const GOOD = new Set(["running", "working", "on deck"]);
const SERVING = new Set(["being read", "ready"]);
const BAD = new Set(["down", "stopping"]);

const byId = (id) => document.getElementById(id);
const colours = new Colours();
const charts = new Charts(byId("charts"), colours);
let history = null;
let events = [];
let latest = null;
let marked = null;
let stream = null;
let paused = false;
let retry = 0;
let silence = 0;

// Writes only what differs: with hundreds of rows once a second, nothing else keeps the page fluent.
function put(node, text) {
  if (node.dpflowText !== text) node.textContent = node.dpflowText = text;
}

// Text in which `commands` are code.
function putCode(node, text) {
  if (node.dpflowText === text) return;
  node.dpflowText = text;
  node.replaceChildren(...text.split("`").map((part, at) => (at % 2 ? make("code", "", part) : part)));
}

function make(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function classed(node, name) {
  if (node.className !== name) node.className = name;
}

// Rows of a table, kept by their key.
class Rows {
  constructor(body, keyOf, build, fill) {
    Object.assign(this, { body, keyOf, build, fill, rows: new Map() });
  }

  show(items) {
    const gone = new Set(this.rows.keys());
    let place = this.body.firstElementChild;
    for (const item of items) {
      const key = this.keyOf(item);
      gone.delete(key);
      if (!this.rows.has(key)) this.rows.set(key, this.build(item));
      const row = this.rows.get(key);
      this.fill(row.parts, item);
      if (row.node === place) place = place.nextElementSibling;
      else this.body.insertBefore(row.node, place);
    }
    for (const key of gone) {
      this.rows.get(key).node.remove();
      this.rows.delete(key);
    }
  }
}

// A row whose first cell is a heading with two lines, and the names of its other cells. Roles are said, since on a phone a
// row is no row for the browser any more, but a card.
function rowOf(id, names, first = make("span")) {
  const small = make("small");
  const head = make("th", "", first, small);
  head.scope = "row";
  head.setAttribute("role", "rowheader");
  const parts = { head: first, small };
  const node = make("tr", "", head);
  node.setAttribute("role", "row");
  const titles = byId(id).closest("table").tHead.rows[0].cells;
  names.forEach(([name, className], at) => {
    const cell = make("td", className);
    cell.setAttribute("role", "cell");
    cell.dataset.title = titles[at + 1].textContent;
    node.append((parts[name] = cell));
  });
  parts.node = node;
  return { node, parts };
}

function two(cell) {
  cell.append(make("span"), make("small"));
}

function putTwo(cell, text, below) {
  put(cell.firstChild, text);
  put(cell.lastChild, below);
}

const flows = new Rows(
  byId("flows"),
  (flow) => flow.flow,
  () => {
    const row = rowOf("flows", [["state", ""], ["limit", "why"], ["rate", "number"], ["hits", "number"], ["decodes", "number"],
      ["workers", "number"], ["sample", "wide why"], ["waiting", "number wide"], ["memory", "number wide"]], marker());
    row.parts.state.append(make("span"));
    for (const name of ["limit", "hits", "decodes", "sample"]) two(row.parts[name]);
    return row;
  },
  (parts, flow) => {
    fillMarker(parts, flow.flow, flow.flow);
    put(parts.small, `${flow.jobs} ${flow.jobs === 1 ? "job" : "jobs"}, ${flow.shards} ${flow.shards === 1 ? "shard" : "shards"}`);
    put(parts.state.firstChild, flow.state);
    classed(parts.state.firstChild, `state ${SERVING.has(flow.state) ? "good" : "wait"}`);
    put(parts.limit.firstChild, flow.limit || "–");
    putCode(parts.limit.lastChild, flow.advice);
    put(parts.rate, plain(flow.samples_per_s));
    putTwo(parts.hits, percent(flow.hit_rate_now), `${percent(flow.hit_rate)} overall`);
    putTwo(parts.decodes, plain(flow.decodes_now), `${plain(flow.decodes)} overall`);
    put(parts.workers, flow.desired ? `${flow.figures.workers} of ${flow.desired}` : `${flow.figures.workers}`);
    putTwo(parts.sample, flow.sample || "–", flow.stages);
    put(parts.waiting, (flow.figures.queued + flow.figures.loading).toLocaleString("en"));
    put(parts.memory, `${bytes(flow.figures.held_bytes)} of ${bytes(flow.figures.room_bytes)}`);
    parts.decodes.title = flow.sharing;
  },
);

const keyOf = (job) => `${job.flow} ${job.job}`;

const jobs = new Rows(
  byId("jobs"),
  keyOf,
  () => {
    const row = rowOf("jobs", [["now", ""], ["stall", "number wide"], ["rate", "number"], ["samples", "number wide"],
      ["read", "number wide"], ["sample", "wide why"], ["limit", "why"]], marker());
    two(row.parts.limit);
    two(row.parts.sample);
    row.parts.meter = make("meter");
    row.parts.share = make("span");
    row.parts.now.append(make("div", "bar", row.parts.meter, row.parts.share));
    return row;
  },
  (parts, job) => {
    fillMarker(parts, keyOf(job), job.job);
    classed(parts.node, `c${colours.of(keyOf(job))}`);
    put(parts.small, job.flow);
    parts.meter.value = job.stall_now ?? 0;
    parts.meter.setAttribute("aria-label", `Stall share of ${job.job}`);
    put(parts.share, job.stall_now === null ? "–" : percent(job.stall_now));
    put(parts.stall, percent(job.stall));
    put(parts.rate, plain(job.samples_per_s));
    put(parts.samples, job.samples.toLocaleString("en"));
    put(parts.read, bytes(job.bytes));
    putTwo(parts.sample, job.sample || "–", job.stages);
    put(parts.limit.firstChild, job.limit || "–");
    putCode(parts.limit.lastChild, job.advice);
  },
);

const workers = new Rows(
  byId("workers"),
  (row) => row.id,
  () => {
    const row = rowOf("workers", [["state", ""], ["role", "wide"], ["where", "wide"], ["restarts", "number"], ["ended", "wide why"]]);
    row.parts.state.append(make("span"));
    return row;
  },
  (parts, row) => {
    put(parts.head, row.flow && row.id.startsWith(`${row.flow}/`) ? row.id.slice(row.flow.length + 1) : row.id);
    put(parts.small, row.flow);
    put(parts.state.firstChild, row.state);
    classed(parts.state.firstChild, `state ${stateOf(row)}`);
    put(parts.role, row.role);
    put(parts.where, row.where);
    put(parts.restarts, String(row.restarts));
    put(parts.ended, row.ended);
  },
);

const stateOf = (row) => (GOOD.has(row.state) ? "good" : BAD.has(row.state) ? "bad" : "wait");

// The name of a job or flow, as a button that has its line stand out in the charts.
function marker() {
  const button = make("button", "mark", make("span"));
  button.type = "button";
  button.title = "Have its line stand out";
  button.addEventListener("click", () => {
    marked = marked === button.dpflowKey ? null : button.dpflowKey;
    charts.mark(marked);
    if (latest) show();
  });
  return button;
}

function fillMarker(parts, key, text) {
  const button = parts.head;
  button.dpflowKey = key;
  put(button.firstChild, text);
  classed(button, `mark c${colours.of(key)}`);
  const pressed = String(marked === key);
  if (button.getAttribute("aria-pressed") !== pressed) button.setAttribute("aria-pressed", pressed);
}

function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; size >= 1024 && unit < units.length - 1; unit += 1) size /= 1024;
  return `${unit ? size.toPrecision(3) : size} ${units[unit]}`;
}

function some(id, noneId, count) {
  byId(id).closest(".scroll").hidden = count === 0;
  byId(noneId).hidden = count > 0;
}

function more(id, count, what) {
  byId(id).hidden = count === 0;
  put(byId(id), `and ${count.toLocaleString("en")} more ${what}`);
}

function showHeadline({ text, advice, state }) {
  put(byId("verdict"), text);
  classed(byId("verdict"), `state ${state}`);
  byId("try").hidden = !advice;
  putCode(byId("try"), `Try: ${advice}.`);
}

function showSummary({ summary }) {
  put(byId("sum-rate"), plain(summary.samples_per_s));
  put(byId("sum-stall"), percent(summary.stall));
  put(byId("sum-hits"), percent(summary.hit_rate));
  put(byId("sum-decodes"), plain(summary.decodes));
  put(byId("sum-workers"), `${summary.workers}${summary.desired === summary.workers ? "" : ` of ${summary.desired}`}`);
  put(byId("sum-restarts"), summary.restarts.toLocaleString("en"));
}

function showWorkers({ processes }) {
  const counts = {};
  for (const row of processes) if (row.role === "worker") counts[row.state] = (counts[row.state] ?? 0) + 1;
  const told = Object.entries(counts).map(([state, count]) => `${count} ${state}`);
  put(byId("states"), told.length ? `Workers: ${told.join(", ")}` : "");
  // Not by state: rows that change their places each second can be read by nobody, and cost a layout.
  const shown = processes.filter((row) => !byId("only").checked || stateOf(row) !== "good");
  shown.sort((one, other) => (other.role === "worker") - (one.role === "worker"));
  workers.show(shown);
  some("workers", "no-workers", shown.length);
}

const KINDS = { restart: ["restart", "wait"], end: ["ended", "wait"], begin: ["began", "good"], change: ["change", "good"], failure: ["failure", "bad"] };
const log = new Rows(
  byId("log"),
  (event) => event.number,
  (event) => {
    const [name, state] = KINDS[event.kind] ?? [event.kind, "wait"];
    const time = make("time", "", clock(event.at));
    time.dateTime = new Date(1000 * event.at).toISOString();
    const node = make("li", "", time, make("span", `state ${state}`, name), make("span", "", make("b", "", event.subject), ` ${event.text}`));
    return { node, parts: {} };
  },
  () => {},
);

function show() {
  const update = latest;
  put(byId("title"), update.title);
  const own = update.kind === "loader";
  document.body.classList.toggle("loader", own);
  put(byId("jobs-title"), own ? "Loaders" : "Jobs");
  put(byId("job-head"), own ? "Loader" : "Job");
  put(byId("workers-title"), own ? "Workers" : "Workers and services");
  document.title = `dpflow · ${update.title}`;
  put(byId("version"), update.version);
  fail(update.failure && `The coordinator ${update.failure}: the states of flows, and what limits them, are as they were.`);
  showHeadline(update.headline);
  showSummary(update);
  charts.show(history);
  flows.show(update.flows);
  some("flows", "no-flows", update.flows.length);
  jobs.show(update.jobs);
  some("jobs", "no-jobs", update.jobs.length);
  more("more-jobs", update.more_jobs, "jobs");
  showWorkers(update);
  more("more-workers", update.more_processes, "processes");
  log.show(events);
  some("log", "no-log", events.length);
}

function append(kept, point) {
  kept.at.push(...point.at);
  const cut = Math.max(0, kept.at.length - MAX_POINTS);
  kept.at.splice(0, cut);
  for (const name of ["stall", "rate", "hit_rate", "decodes"]) {
    const [all, news] = [kept[name], point[name]];
    for (const key of Object.keys(news)) all[key] ??= new Array(kept.at.length - 1 + cut).fill(null);
    for (const [key, values] of Object.entries(all)) {
      values.push(...(news[key] ?? [null]));
      values.splice(0, cut);
      if (!(key in news) && (Object.keys(all).length > MAX_SERIES || values.every((one) => one === null))) delete all[key];
    }
  }
}

function receive(update) {
  const news = update.whole ? [] : update.events;
  if (update.whole) [history, events] = [update.history, update.events.slice().reverse()];
  else if (!history) return;
  else {
    append(history, update.history);
    events = [...update.events.slice().reverse(), ...events].slice(0, MAX_EVENTS);
  }
  latest = update;
  link("live", "good");
  document.body.classList.remove("old");
  clearTimeout(silence);
  silence = setTimeout(again, SILENCE_MS); // a host that has vanished ends no connection
  show();
  const spoken = news.filter((event) => event.kind === "restart" || event.kind === "failure");
  if (spoken.length) put(byId("spoken"), spoken.map((event) => `${event.subject} ${event.text}`).join("; "));
}

function fail(text) {
  byId("failure").hidden = !text;
  put(byId("failure"), text);
}

// What is shown is old now, and has to look so.
function lost() {
  link("no connection", "bad");
  document.body.classList.add("old");
  const who = latest && latest.kind === "loader" ? "The training has ended, or its page does not answer" : "This page does not answer";
  if (latest) {
    latest = withoutPresent(latest);
    show();
  }
  fail(latest ? `${who}: totals are as of ${clock(latest.at)}.` : `${who}.`);
}

// The same without the figures of the last seconds, which are not known any more.
function withoutPresent(update) {
  const blank = (line, ...names) => ({ ...line, ...Object.fromEntries(names.map((name) => [name, null])) });
  return {
    ...update,
    headline: { text: "What limits the run is not known: there is no connection.", advice: "", state: "bad" },
    summary: blank(update.summary, "samples_per_s", "stall", "hit_rate", "decodes"),
    flows: update.flows.map((flow) => ({ ...blank(flow, "samples_per_s", "hit_rate_now", "decodes_now", "limit"), advice: "" })),
    jobs: update.jobs.map((job) => ({ ...blank(job, "samples_per_s", "stall_now", "limit"), advice: "" })),
  };
}

function again() {
  lost();
  connect();
}

function link(text, state) {
  put(byId("link"), text);
  classed(byId("link"), `state ${state}`);
}

function connect() {
  clearTimeout(retry);
  clearTimeout(silence);
  if (stream) stream.close();
  stream = null;
  if (paused || document.hidden) return;
  stream = new EventSource("api/stream");
  stream.onmessage = (event) => receive(JSON.parse(event.data));
  silence = setTimeout(again, SILENCE_MS);
  stream.onerror = () => {
    lost();
    // An answer that is no stream, as "too many pages", ends the browser's own attempts.
    if (stream && stream.readyState === EventSource.CLOSED) retry = setTimeout(connect, 2000);
  };
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (paused) link("paused", "wait");
  connect();
});
byId("only").addEventListener("change", () => latest && showWorkers(latest));
document.addEventListener("visibilitychange", connect);
connect();
