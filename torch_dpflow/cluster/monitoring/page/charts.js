// Four charts over time, drawn by uPlot: one line for each job, or for each flow.

/* global uPlot */

const COLOURS = 8;
const SHORTEST_S = 60;
const LONG_S = 240; // from here on, times are without seconds
const MOST_NAMED = 5;

const percent = (value) => (value === null ? "–" : `${Math.round(100 * value)}%`);
const plain = (value) => (value === null ? "–" : value >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toFixed(2)));
const KINDS = [
  { name: "stall", title: "Stall share", show: percent, top: 1 },
  { name: "rate", title: "Samples per second", show: plain },
  { name: "hit_rate", title: "Hit rate", show: percent, top: 1, shared: true },
  { name: "decodes", title: "Decodes per delivered sample", show: plain, least: 1.05, shared: true },
];

const clock = (at, withSeconds = true) =>
  new Date(1000 * at).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: withSeconds ? "2-digit" : undefined });
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Which colour a job or flow has: in the order in which they came, for as long as they are there.
export class Colours {
  constructor() {
    this.numbers = new Map();
  }

  of(key) {
    if (!this.numbers.has(key)) this.numbers.set(key, this.numbers.size % COLOURS);
    return this.numbers.get(key);
  }
}

class Chart {
  constructor(parent, kind, colours) {
    this.kind = kind;
    this.colours = colours;
    this.keys = [];
    this.marked = null;
    this.figure = document.createElement("figure");
    this.figure.className = kind.shared ? "chart shared" : "chart";
    const caption = this.figure.appendChild(document.createElement("figcaption"));
    caption.appendChild(document.createElement("b")).textContent = kind.title;
    this.legend = caption.appendChild(document.createElement("div"));
    this.legend.className = "legend";
    this.plot = this.figure.appendChild(document.createElement("div"));
    this.plot.className = "plot";
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "img");
    this.none = this.plot.appendChild(document.createElement("p"));
    this.none.textContent = "Nothing was read in the last ten minutes";
    this.plot.addEventListener("keydown", (event) => this.step(event));
    this.plot.addEventListener("blur", () => this.point(null));
    parent.appendChild(this.figure);
    new ResizeObserver(() => this.fit()).observe(this.plot);
  }

  fit() {
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (this.chart && width) this.chart.setSize({ width, height });
  }

  forget() {
    if (this.chart) this.chart.destroy();
    this.chart = null;
  }

  show(history) {
    const columns = history[this.kind.name];
    const keys = Object.keys(columns).filter((key) => columns[key].some((one) => one !== null));
    this.none.hidden = keys.length > 0;
    if (!keys.length) {
      // Without a chart: its grid would run through the words.
      this.keys = keys;
      this.forget();
      this.told = null;
      this.caption("", String);
      this.plot.setAttribute("aria-label", `${this.kind.title}, now: nothing is read`);
      return;
    }
    const data = [history.at, ...keys.map((key) => columns[key])];
    if (!this.chart || keys.length !== this.keys.length || keys.some((key, at) => key !== this.keys[at])) {
      this.keys = keys;
      this.forget();
      this.chart = new uPlot(this.options(), data, this.plot);
      this.mark(this.marked);
      this.told = null;
    } else {
      this.chart.setData(data);
    }
    if (this.chart.cursor.idx === null || this.chart.cursor.idx === undefined || this.chart.cursor.left < 0) this.tell(null);
  }

  options() {
    const quiet = colourOf("quiet");
    const axis = { stroke: quiet, font: "12px system-ui, sans-serif", grid: { stroke: colourOf("grid"), width: 1 }, ticks: { show: false } };
    const { top, least = 0.001, show } = this.kind;
    return {
      width: this.plot.clientWidth,
      height: this.plot.clientHeight,
      legend: { show: false },
      padding: [8, 24, 0, 0], // half of a time at the right edge
      cursor: { drag: { x: false, y: false }, focus: { prox: 30 }, points: { size: 7 } },
      focus: { alpha: 0.25 },
      scales: {
        x: { time: true, range: (_, from, to) => [Math.min(from ?? to, to - SHORTEST_S), to] },
        y: { range: (_, from, to) => [0, top ?? Math.max(least, 1.1 * (to ?? 1))] },
      },
      axes: [
        { ...axis, size: 26, space: (_, number, from, to) => (to - from < LONG_S ? 76 : 42), values: (chart, at) => at.map((one) => clock(one, chart.scales.x.max - chart.scales.x.min < LONG_S)) },
        { ...axis, size: 52, space: 36, values: (_, at) => at.map(show) },
      ],
      series: [{}, ...this.keys.map((key) => ({ label: key, stroke: colourOf(`c${this.colours.of(key)}`), width: 1.75, points: { show: false } }))],
      hooks: {
        setCursor: [(chart) => this.tell(chart.cursor.left >= 0 ? chart.cursor.idx : null)],
        setSeries: [(_, number, options) => { if (options.focus) this.near = number; }],
      },
    };
  }

  // What is under the cursor, or else what is there now.
  tell(at) {
    if (!this.chart) return;
    const { data } = this.chart;
    const name = (number) => this.keys[number - 1].slice(this.keys[number - 1].indexOf(" ") + 1);
    const value = (number, index) => this.kind.show(data[number][index] ?? null);
    const last = data[0].length - 1;
    const now = this.keys.map((_, number) => `${name(number + 1)} ${value(number + 1, last)}`);
    let text = "";
    if (at !== null && at !== undefined && this.keys.length) {
      const number = this.near ?? this.keys.findIndex((key) => key === this.marked) + 1;
      const lines = number > 0 ? [number] : this.keys.slice(0, 4).map((_, one) => one + 1);
      text = `${clock(data[0][at])} · ${lines.map((one) => `${name(one)} ${value(one, at)}`).join(" · ")}`;
    }
    this.caption(text, name);
    this.plot.setAttribute("aria-label", text || `${this.kind.title}, now: ${now.slice(0, 8).join(", ") || "nothing is read"}`);
  }

  // Beside the title: what is under the cursor, or else whose line is which.
  caption(text, name) {
    if (text === this.told) return;
    this.told = text;
    const items = this.keys.map((key, at) => [name(at + 1), `c${this.colours.of(key)}`]);
    const few = items.length <= MOST_NAMED ? items : [[`${items.length} ${this.kind.shared ? "flows" : "jobs"}, coloured as below`, ""]];
    this.legend.replaceChildren(...(text ? [[text, ""]] : few).map(([label, colour]) => {
      const item = document.createElement("span");
      item.className = colour || "plain";
      item.textContent = label;
      return item;
    }));
  }

  step(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !this.chart || !this.keys.length) return;
    event.preventDefault();
    const last = this.chart.data[0].length - 1;
    this.point(Math.max(0, Math.min(last, (this.chart.cursor.left >= 0 ? this.chart.cursor.idx : last) + moves[event.key])));
  }

  point(index) {
    if (!this.chart) return;
    if (index === null) this.chart.setCursor({ left: -10, top: -10 });
    else this.chart.setCursor({ left: this.chart.valToPos(this.chart.data[0][index], "x"), top: 1 });
  }

  mark(key) {
    this.marked = key;
    const number = this.keys.indexOf(key) + 1;
    if (this.chart) this.chart.setSeries(number || null, { focus: true });
    if (!number) this.near = null;
  }
}

export class Charts {
  constructor(parent, colours) {
    this.charts = KINDS.map((kind) => new Chart(parent, kind, colours));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.charts.forEach((chart) => chart.forget());
      if (this.history) this.show(this.history);
    });
  }

  show(history) {
    this.history = history;
    // One in each frame: together they take longer than one where there are dozens of jobs.
    const waiting = [...this.charts];
    const next = () => {
      const chart = waiting.shift();
      if (!chart || this.round !== round) return;
      if (!chart.kind.shared || !document.body.classList.contains("loader")) chart.show(history);
      requestAnimationFrame(next);
    };
    const round = (this.round = (this.round ?? 0) + 1);
    requestAnimationFrame(next);
  }

  mark(key) {
    this.charts.forEach((chart) => chart.mark(key));
  }
}

export { clock, percent, plain };
