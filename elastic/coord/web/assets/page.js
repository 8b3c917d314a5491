// Keeps a page up to date: parts that changed, points of charts, lines of output.
// What comes from the server is either markup that it has escaped, or text that is set as text.

const LINES_MAX = 2000, POINTS_MAX = 600, AGAIN_MS = 2000, AGAIN_MS_MAX = 30000;
const body = document.body, live = document.getElementById("live");

// --------------------------------------------------------------------------------------- streams

// A browser connects again by itself where a stream broke, and not where the answer was an error:
// such as while no coordinator leads, or of a proxy while there is none.
function onRefused(events, again) {
  events.addEventListener("error", async () => {
    if (events.readyState !== EventSource.CLOSED) return;
    for (let pause = AGAIN_MS; ; pause = Math.min(2 * pause, AGAIN_MS_MAX)) {
      await new Promise((resolve) => setTimeout(resolve, pause));
      const status = await statusOf(events.url);
      if (status === 200) return again();
      // A coordinator knows none of another one's logins: the page then is the form for it.
      if (status === 401) return location.reload();
      if (status === 403 || status === 404) return;
    }
  });
}

// An EventSource does not tell it.
async function statusOf(url) {
  const asking = new AbortController();
  try {
    return (await fetch(url, { signal: asking.signal })).status;
  } catch {
    return 0;
  } finally {
    asking.abort();
  }
}

// ------------------------------------------------------------------------------------------ ages

function age(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s ago`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes}m ${Math.floor(seconds % 60)}s ago`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `${hours}h ${minutes % 60}m ago` : `${Math.floor(hours / 24)}d ${hours % 24}h ago`;
}

function showAges() {
  for (const element of document.querySelectorAll("time.age")) {
    if (!element.title) element.title = element.textContent;
    const text = age((Date.now() - Date.parse(element.dateTime)) / 1000);
    if (element.textContent !== text) element.textContent = text;
  }
}

// ----------------------------------------------------------------------------------------- parts

function setPart(key, html) {
  const old = document.getElementById(key);
  if (!old) return;
  const template = document.createElement("template");
  template.innerHTML = html;
  const fresh = template.content.firstElementChild;
  if (!fresh) return;
  for (const element of fresh.querySelectorAll("time.age")) element.title = element.textContent;
  old.replaceWith(fresh);
}

function setList(key, items) {
  const list = document.getElementById(key);
  if (!list) return;
  const known = new Map([...list.children].map((child) => [child.id, child]));
  const tag = list.tagName === "TBODY" ? "tr" : "section";
  list.replaceChildren(...items.map((id) => {
    if (known.has(id)) return known.get(id);
    const hole = document.createElement(tag);
    hole.id = id;
    return hole;
  }));
}

// ---------------------------------------------------------------------------------------- charts

const charts = new Map();
let marks = { generations: [], checkpoints: [] };

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Vertical lines: solid where a generation began to train, dotted at checkpoints.
function drawMarks(plot) {
  const { ctx, bbox } = plot, [low, high] = [plot.scales.x.min, plot.scales.x.max];
  const draw = (moments, dash, style) => {
    ctx.save();
    ctx.strokeStyle = style;
    ctx.globalAlpha = 0.6;
    ctx.setLineDash(dash);
    ctx.beginPath();
    for (const moment of moments) {
      if (moment < low || moment > high) continue;
      const x = Math.round(plot.valToPos(moment, "x", true)) + 0.5;
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
    }
    ctx.stroke();
    ctx.restore();
  };
  draw(marks.checkpoints, [2, 4], colour("--quiet"));
  draw(marks.generations.slice(1).map((mark) => mark[0]), [], colour("--pause"));
}

function clock(_, moments) {
  return moments.map((moment) => new Date(moment * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false }));
}

function short(_, values) {
  return values.map((value) => Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(1) : Number(value.toPrecision(6)).toString());
}

function newChart(name) {
  const box = document.createElement("div"), title = document.createElement("h3");
  const label = document.createElement("span"), newest = document.createElement("b");
  box.className = "chart";
  label.textContent = name;
  title.append(label, newest);
  box.append(title);
  document.getElementById("charts").append(box);
  const chart = { box, newest, times: [], values: [], plot: null };
  charts.set(name, chart);
  return chart;
}

function drawChart(name, chart) {
  const data = [chart.times, chart.values];
  const last = chart.values[chart.values.length - 1];
  chart.newest.textContent = last === null || last === undefined ? "–" : Number(last.toPrecision(4)).toString();
  if (chart.plot) return chart.plot.setData(data);
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  chart.plot = new uPlot({
    width: Math.max(200, chart.box.clientWidth - 18), height: 140, legend: { show: false },
    cursor: { drag: { x: true, y: false } },
    axes: [{ ...axis, size: 30, space: 80, values: clock }, { ...axis, size: 60, values: short }],
    scales: { x: { time: false } },
    series: [{}, { label: name, stroke: colour("--bar0"), width: 1.5, points: { show: chart.times.length < 3 },
      paths: name === "workers" ? uPlot.paths.stepped({ align: 1 }) : undefined }],
    hooks: { draw: [drawMarks] },
  }, data, chart.box);
}

function addPoint([name, time, value]) {
  const chart = charts.get(name) || newChart(name);
  if (chart.times.length && time <= chart.times[chart.times.length - 1]) return;
  chart.times.push(time);
  chart.values.push(value);
  if (chart.times.length > 2 * POINTS_MAX) {
    chart.times = chart.times.filter((_, index) => index % 2 === 0);
    chart.values = chart.values.filter((_, index) => index % 2 === 0);
  }
}

async function loadCharts() {
  const answer = await fetch(body.dataset.charts);
  if (!answer.ok) return 0;
  const told = await answer.json();
  marks = told.marks;
  for (const [name, series] of Object.entries(told.series)) {
    const chart = charts.get(name) || newChart(name);
    [chart.times, chart.values] = [series.t, series.v];
    drawChart(name, chart);
  }
  return told.seq;
}

function redrawCharts() {
  for (const [name, chart] of charts) {
    if (chart.plot) chart.plot.destroy();
    chart.plot = null;
    drawChart(name, chart);
  }
}

// ---------------------------------------------------------------------------------------- output

let output = null;

function showLines(log, told) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  const lines = document.createDocumentFragment();
  const add = (head, text) => {
    const line = document.createElement("div"), mark = document.createElement("i");
    mark.textContent = head;
    line.append(mark, text);
    lines.append(line);
  };
  if (told.skipped) add("", `… ${told.skipped} lines came faster than they are shown …`);
  for (const [seconds, generation, rank, node, text] of told.lines || []) {
    const time = seconds ? `${new Date(seconds * 1000).toLocaleTimeString([], { hour12: false })} ` : "";
    add(`${time}${rank < 0 ? `[${node}]` : `[g${generation} r${rank} ${node}]`} `, text);
  }
  if (told.over && told.over !== log.lastChild?.textContent) add("", told.over);
  log.append(lines);
  while (log.children.length > LINES_MAX) log.firstChild.remove();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function followOutput(query) {
  const log = document.getElementById("log");
  if (output) output.close();
  log.replaceChildren();
  const events = output = new EventSource(`${body.dataset.log}/stream?${query}`);
  let isNew = false;
  events.onopen = () => { isNew = true; };
  onRefused(events, () => { if (events === output) followOutput(query); });
  events.onmessage = (event) => {
    const told = JSON.parse(event.data);
    // The newest lines come again with each connection, but from a coordinator that does not lead.
    if (told.lines && isNew) {
      log.replaceChildren();
      isNew = false;
    }
    showLines(log, told);
    if (told.end) events.close();
  };
}

if (body.dataset.log) {
  const form = document.getElementById("log-form");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    followOutput(new URLSearchParams(new FormData(form)));
  });
  followOutput("");
}

// ----------------------------------------------------------------------------------------- begin

async function begin() {
  follow(body.dataset.charts && window.uPlot ? await loadCharts().catch(() => 0) : 0);
}

// Points that come twice, as when all are sent again, are left out by their time.
function follow(number) {
  const events = new EventSource(`${body.dataset.stream}?seq=${number}`);
  events.onopen = () => { live.textContent = "live"; live.className = ""; };
  events.onerror = () => { live.textContent = "not connected"; live.className = "lost"; };
  onRefused(events, () => follow(0));
  events.onmessage = (event) => {
    const told = JSON.parse(event.data);
    if (told.list) setList(told.list, told.items);
    else if (told.set) setPart(told.set, told.html);
    else if (told.points && window.uPlot) {
      if (told.marks) marks = told.marks;
      told.points.forEach(addPoint);
      for (const name of new Set(told.points.map((point) => point[0]))) drawChart(name, charts.get(name));
    } else if (told.over) { live.textContent = told.over; live.className = "lost"; }
    showAges();
  };
}

setInterval(showAges, 1000);
showAges();
let resized = 0;
window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(redrawCharts, 200); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
if (body.dataset.stream) begin();
