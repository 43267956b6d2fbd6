// Charts and small helpers of the pages.
"use strict";

const $ = (id) => document.getElementById(id);
const COLOURS = ["#1976d2", "#e8710a", "#2e9e4f", "#c2185b", "#7b4fd0", "#00838f", "#a1662f", "#8a8f00"];
const charts = [];

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? (value + 0).toLocaleString("en") : Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

const timeOfDay = (seconds) => new Date(1000 * seconds).toTimeString().slice(0, 8);

function cell(row, text, kind = "td", name = "") {
  const made = row.appendChild(document.createElement(kind));
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

// Show a text in the status line at the top of the page, for example an error.
const say = (text, kind = "") => { $("connection").textContent = text; $("connection").className = kind; };
const lost = (error) => say(`no connection to td3-robot dashboard: ${error.message}`, "bad");

// Shows named values as tiles.
function showTiles(place, facts, digits) {
  place.replaceChildren(...facts.map(([name, value]) => {
    const tile = document.createElement("div");
    tile.dataset.fact = name;
    cell(tile, name, "dt");
    cell(tile, number(value, digits), "dd");
    return tile;
  }));
}

// Fills a table with one row for each channel. A box in the row selects the channel for a chart. The texts of a row begin
// with the name of the channel.
function listChannels(body, names, selected, redraw, texts) {
  body.replaceChildren();
  names.forEach((name, index) => {
    const row = body.insertRow(), box = document.createElement("input");
    row.dataset.channel = name;
    Object.assign(box, { type: "checkbox", checked: selected.has(name) });
    box.setAttribute("aria-label", `plot ${name}`);
    box.onchange = () => { box.checked ? selected.add(name) : selected.delete(name); redraw(); };
    cell(row, "").append(box);
    texts[index].forEach((text, column) => (column ? cell(row, text) : (cell(row, text, "th").scope = "row")));
  });
}

// A chart that adapts to the width of its element and to the colour scheme. Its labels name the series. If
// "points" is true, each series is a row of points, and the vertical axis has the names of the series.
class Chart {
  constructor(id, { time = false, bars = false, points = false, values = null, label = "steps" } = {}) {
    Object.assign(this, { place: $(id), time, bars, points, values, label, labels: [], data: null, plot: null });
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(this.place);
    charts.push(this);
  }

  size() {
    return { width: Math.max(200, this.place.clientWidth), height: 230 };
  }

  // Bands fill the space between two series: { series: [upper, lower], fill: colour }. A series without a label is not in
  // the legend. The range is for the horizontal axis; with null, the axis fits the data.
  set(labels, data, { bands = [], colours = COLOURS, range = null } = {}) {
    const same = this.plot && labels.join("\n") === this.labels.join("\n") && String(range) === String(this.range);
    Object.assign(this, { labels, data, bands, colours, range });
    if (same) this.plot.setData(data);
    else this.draw();
  }

  draw() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    if (!this.data || !this.data[0].length || this.place.clientWidth === 0) return;
    const style = getComputedStyle(document.documentElement);
    const axis = { stroke: style.getPropertyValue("--quiet"), grid: { stroke: style.getPropertyValue("--grid"), width: 1 }, ticks: { stroke: style.getPropertyValue("--grid") } };
    const paths = this.bars ? uPlot.paths.bars({ size: [0.8] }) : this.points ? () => null : undefined;
    const series = this.labels.map((label, index) => ({
      label, class: label ? undefined : "unnamed", stroke: this.colours[index % this.colours.length], width: 1.5, spanGaps: true, paths, ...(this.points && { points: { show: true, size: 8 } }),
      fill: this.bars ? this.colours[index % this.colours.length] + "80" : undefined,
    }));
    const words = this.time ? timeOfDay : this.values;
    const first = { ...axis, ...(words && { values: (plot, splits) => splits.map(words) }), ...(this.time && { space: 55 }) };
    const x = { label: this.values ? "bin" : this.time ? "time" : this.label, ...(words && { value: (plot, raw) => (raw === null ? "–" : words(raw)) }) };
    const rows = this.labels.map((_, index) => index);
    const second = this.points ? { ...axis, splits: () => rows, values: () => this.labels } : axis;
    const scales = { x: { time: this.time, ...(this.range && { range: this.range }) }, ...(this.points && { y: { range: [-0.5, rows.length - 0.5] } }) };
    this.plot = new uPlot(
      { ...this.size(), bands: this.bands, scales, axes: [first, { ...second, size: this.points ? 90 : 70 }], series: [x, ...series] },
      this.data, this.place);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.draw()));
