// Charts of the steps. The page has their last, least and greatest values, and a table of the steps,
// without this script; it draws them, reads them at the pointer, and goes on with new steps.
const box = document.querySelector("[data-series]");
const { default: uPlot } = await import(box.dataset.uplot);
const news = document.getElementById("news");
const HEIGHT = 190;
// By the chart's name.
const plots = new Map();
let drawn = null;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

// As the server writes them (text_format.format_duration).
function duration(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function shown(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return `${Number((100 * value).toPrecision(3))}%`;
  if (unit === "s") return duration(value);
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1);
  return compact.format(value);
}

// Parts of a whole stand on each other: each is drawn up to the sum of those before it, the highest
// first, so that the others cover it. Of a step that has no part nothing is drawn.
function sums(series) {
  const reached = drawn.steps.map((_, n) => (series.some(({ values }) => values[n] !== null) ? 0 : null));
  return series.map(({ values }) => {
    values.forEach((value, n) => {
      if (value !== null) reached[n] += value;
    });
    return [...reached];
  });
}

function columns(chart) {
  const values = chart.stacked ? sums(chart.series).reverse() : chart.series.map((one) => one.values);
  return [drawn.steps, ...values];
}

function line(chart, label, number) {
  const stroke = colour(`--c${number + 1}`);
  return {
    label,
    stroke,
    fill: chart.stacked ? stroke : undefined,
    width: chart.stacked ? 1 : 1.75,
    spanGaps: true,
    points: { size: 5, fill: stroke },
  };
}

function options(chart, figure) {
  const axis = { stroke: colour("--dim"), font: `11px ${colour("--sans")}`, ticks: { show: false } };
  const grid = { stroke: colour("--line"), width: 1 };
  const lines = chart.series.map((one, n) => line(chart, one.label, n));
  const whole = (_, least, greatest) => [0, greatest || 1];
  return {
    width: figure.querySelector(".plot").clientWidth,
    height: HEIGHT,
    legend: { show: false },
    scales: { x: { time: false }, y: chart.stacked ? { range: whole } : {} },
    series: [{}, ...(chart.stacked ? lines.reverse() : lines)],
    axes: [
      { ...axis, grid: { show: false }, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] },
      { ...axis, grid, size: 54, values: (_, marks) => marks.map((mark) => shown(mark, chart.unit)) },
    ],
    cursor: { sync: { key: "steps" }, y: false, points: { show: !chart.stacked } },
    hooks: { setCursor: [(plot) => read(figure, chart.name, plot.cursor.idx)] },
  };
}

// The values at the pointer's step, in all charts; elsewhere the last ones.
function read(figure, name, at) {
  const chart = drawn.charts[name];
  const there = at !== null && at !== undefined && at < drawn.steps.length;
  figure.querySelector("[data-at]").textContent = there ? `step ${drawn.steps[at]}` : "last";
  figure.querySelectorAll("tbody tr").forEach((row, n) => {
    const one = chart.series[n];
    if (one) row.cells[1].textContent = there ? shown(one.values[at], chart.unit) : one.texts[0];
  });
}

function tell(figure, chart) {
  const rows = chart.series.map((one, n) => {
    const row = document.createElement("tr");
    const head = row.appendChild(document.createElement("th"));
    head.scope = "row";
    head.appendChild(document.createElement("span")).className = `dot c${n + 1}`;
    head.append(one.label);
    for (const text of one.texts) {
      const cell = row.appendChild(document.createElement("td"));
      cell.className = "num";
      cell.textContent = text;
    }
    return row;
  });
  figure.querySelector("tbody").replaceChildren(...rows);
  figure.querySelector("[data-at]").textContent = "last";
}

function draw(figure, chart) {
  const place = figure.querySelector(".plot");
  figure.hidden = !chart.series.length;
  const known = plots.get(chart.name);
  const labels = chart.series.map((one) => one.label).join("\n");
  if (known && known.labels === labels) {
    known.plot.setData(columns(chart));
    read(figure, chart.name, known.plot.cursor.idx);
    return;
  }
  known?.plot.destroy();
  plots.delete(chart.name);
  if (figure.hidden) return;
  plots.set(chart.name, { labels, plot: new uPlot(options(chart, figure), columns(chart), place) });
}

function drawAll() {
  for (const figure of box.querySelectorAll("[data-chart]")) {
    const chart = { name: figure.dataset.chart, ...drawn.charts[figure.dataset.chart] };
    tell(figure, chart);
    draw(figure, chart);
  }
}

// Where there is no answer now, the next event of a step asks again.
async function refresh() {
  const answer = await fetch(box.dataset.series).catch(() => null);
  if (!answer?.ok || !answer.headers.get("content-type")?.startsWith("application/json")) return;
  drawn = await answer.json();
  drawAll();
  const { steps, every } = drawn;
  document.querySelector("[data-range]").textContent = steps.length
    ? `Steps ${steps[0]} to ${steps.at(-1)}${every > 1 ? `, one of ${every}` : ""}`
    : "";
}

function follow() {
  let source = null;
  const open = () => {
    source = new EventSource(box.dataset.live);
    source.addEventListener("step", (message) => {
      const { newest, new: count } = JSON.parse(message.data);
      news.hidden = !(count > 0);
      news.textContent = count > 0 ? `${count} new` : "";
      if (newest > 0 && newest !== drawn?.steps.at(-1)) refresh();
    });
  };
  const look = () => {
    if (document.hidden) {
      source?.close();
      source = null;
    } else if (!source) {
      open();
    }
  };
  document.addEventListener("visibilitychange", look);
  look();
}

new ResizeObserver(() => {
  for (const { plot } of plots.values()) {
    const width = plot.root.parentElement.clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
  }
}).observe(box);

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const { plot } of plots.values()) plot.destroy();
  plots.clear();
  if (drawn) drawAll();
});

await refresh();
box.dataset.drawn = "";
follow();
