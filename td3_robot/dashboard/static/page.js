// The page of td3-robot dashboard. All text from nodes goes into the page with textContent.
"use strict";

let about = { history: 1200, bins_ms: [] };
let metricsVersion = "";
let trend = [];
let channelHistory = { times: [], rows: [] };
let selected = new Set();

const returns = new Chart("chart-return");
const losses = new Chart("chart-loss");
const rates = new Chart("chart-rate", { time: true });
const staleness = new Chart("chart-stale", { time: true });
const channels = new Chart("chart-channels", { time: true });
const body = new Robot("drawing", 0.5);
const latency = new Chart("chart-latency", { bars: true, values: (index) => binName(index) });

function binName(index) {
  const edges = about.bins_ms;
  if (!Number.isInteger(index) || index < 0 || index > edges.length) return "";
  return index < edges.length ? `≤${edges[index]} ms` : `>${edges[edges.length - 1]} ms`;
}

// Joins series from several tables over one axis of environment steps. Returns labels and data; null if there is no series.
function joined(parts) {
  const tables = parts.filter(({ table, name }) => table.env_steps && table[name]);
  if (!tables.length) return null;
  return [tables.map(({ label }) => label), uPlot.join(tables.map(({ table, name }) => [table.env_steps, table[name]]))];
}

async function loadMetrics() {
  const answer = await fetch("/metrics");
  if (!answer.ok) return;
  const { train, evaluation } = await answer.json();
  if (train.env_steps || evaluation.env_steps) $("training").hidden = false;
  const drawn = joined([{ table: train, name: "return_mean", label: "training" }, { table: evaluation, name: "eval_return_mean", label: "evaluation" }]);
  if (drawn) returns.set(...drawn);
  const loss = joined(Object.keys(train).filter((name) => name.endsWith("_loss")).map((name) => ({ table: train, name, label: name.replaceAll("_", " ") })));
  if (loss) losses.set(...loss);
  const body = $("records").tBodies[0];
  body.replaceChildren();
  for (const [kind, table] of [["train", train], ["evaluation", evaluation]])
    for (const [name, values] of Object.entries(table)) {
      const row = body.insertRow();
      row.dataset.name = `${kind}.${name}`;
      cell(row, kind);
      cell(row, name);
      cell(row, String(values[values.length - 1]));
    }
}

function showFigures(figures) {
  showTiles($("tiles"), [["environment steps", figures.env_steps], ["updates", figures.updates], ["steps/s", figures.steps_per_s], ["updates/s", figures.updates_per_s],
    ["replay ratio", figures.replay_ratio], ["age of weights (updates)", figures.staleness_updates], ["return of training", figures.return_mean]]);
}

function showHistory() {
  const times = trend.map((point) => point.time);
  const column = (name) => trend.map((point) => point[name] ?? null);
  rates.set(["steps/s", "updates/s"], [times, column("steps_per_s"), column("updates_per_s")]);
  staleness.set(["age"], [times, column("staleness_updates")]);
}

// A small histogram of the times between the messages of a node.
function bars(counts) {
  const all = counts.reduce((sum, count) => sum + count, 0), most = Math.max(...counts), place = document.createElement("span");
  if (!all) return "–";
  const shares = counts.map((count, index) => (count ? `${binName(index)}: ${number((100 * count) / all, 3)} %` : "")).filter(Boolean);
  place.className = "bars";
  place.title = shares.join("\n");
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", shares.join(", "));
  for (const count of counts) place.appendChild(document.createElement("i")).style.height = `${(100 * count) / most}%`;
  return place;
}

// The bin that holds the median.
function medianBin(counts) {
  const half = counts.reduce((sum, count) => sum + count, 0) / 2;
  let seen = 0;
  return half ? binName(counts.findIndex((count) => (seen += count) >= half)) : "";
}

const listed = (map) => Object.entries(map).map(([name, value]) => `${name} ${number(value)}`).join(", ");

// begun: the time at which the dashboard attached to the nodes, in seconds since 1970.
function showNodes({ nodes, faults, begun }) {
  const body = $("nodes").tBodies[0];
  body.replaceChildren();
  for (const node of nodes) {
    const row = body.insertRow();
    row.dataset.node = node.name;
    cell(row, node.name + (["", "node", node.name].includes(node.role) ? "" : ` (${node.role})`), "th").scope = "row";
    const silent = node.age_s !== null && node.age_s > 3;
    const trouble = silent || ["fault", "failed"].includes(node.state);
    cell(row, (silent ? "silent, was " : "") + (node.state || "–") + (node.detail ? `: ${node.detail}` : ""), "td", trouble ? "bad" : "good");
    cell(row, number(node.rate_hz, 3));
    if (node.pace) cell(row, "").append(bars(node.pace), ` ${medianBin(node.pace)}`);
    else cell(row, "–");
    cell(row, node.age_s === null ? "–" : `${node.age_s.toFixed(1)} s ago`);
    cell(row, number(node.missing));
    for (const made of row.cells) made.dataset.label = $("nodes").tHead.rows[0].cells[made.cellIndex].textContent;
    for (const [label, values] of [["counters", node.counters], ["measurements", node.figures]]) {
      if (!Object.keys(values).length) continue;
      const more = body.insertRow();
      more.className = "more";
      cell(more, `${label}: ${listed(values)}`, "td", "long").colSpan = row.cells.length;
    }
  }
  $("faults").replaceChildren(...(faults ?? []).map((fault) => {
    const item = document.createElement("li");
    const first = fault.first_s === null ? "" : `, first at ${timeOfDay(begun + fault.first_s)}`;
    item.textContent = `${fault.what} (${fault.count === 1 ? "once" : `${fault.count} times`}${first})`;
    return item;
  }));
}

const keyOf = (robot) => `${robot.source}/${robot.index}`;

function showRobots(live) {
  const list = $("robot"), keys = live.robots.map(keyOf);
  if (keys.join("\n") !== [...list.options].map((option) => option.value).join("\n")) {
    const before = list.value;
    list.replaceChildren(...live.robots.map((robot) => new Option(robot.robots > 1 ? `${robot.source}, robot ${robot.index} of ${robot.robots}${robot.index + 1 === about.listed && robot.robots > about.listed ? " (the last on this page)" : ""}` : robot.source, keyOf(robot))));
    list.value = keys.includes(before) ? before : keys[0] ?? "";
    if (list.value !== before) forgetChannels();
  }
  const robot = live.robots.find((one) => keyOf(one) === list.value);
  if (!robot) {
    $("robot-facts").textContent = "no robot has sent a Step yet";
    return;
  }
  $("robot-facts").textContent = `action from: ${robot.origin}. Episode ${robot.episode}, step ${robot.episode_step}, ${robot.phase}. Reward ${number(robot.reward)}`;
  // Must run before body.play: if the robot has other channels than before, showChannels cancels all pictures.
  showChannels(robot, live.specs[robot.source] ?? {}, live.point.time);
  $("undrawn").textContent = whyUndrawn(robot, live.drawable);
  $("undrawn").hidden = !$("undrawn").textContent;
  const drawn = live.drawn?.[keyOf(robot)];
  if (drawn) {
    $("body").hidden = false;
    body.play(drawn);
  }
  const counts = live.latency[robot.source];
  if (counts) latency.set(["loops"], [counts.map((_, index) => index), counts]);
}

// Why the page does not draw a robot; empty if the page draws it.
function whyUndrawn({ source, index }, drawable) {
  if (!drawable.includes(source)) return "The page does not draw this robot, because the robot's links are unknown or the observation lacks a joint angle. See the option --links of td3-robot dashboard.";
  return index < about.drawn ? "" : `The page draws only the first ${about.drawn} robots of a source.`;
}

function forgetChannels() {
  $("body").hidden = true;
  body.forget();
  channelHistory = { times: [], rows: [] };
  selected = new Set();
  $("channels").tBodies[0].replaceChildren();
}

function showChannels(robot, spec, time) {
  const about_ = (list, index, kind) => list?.[index] ?? { name: `${kind} ${index}`, unit: "" };
  const all = [
    ...robot.observation.map((value, index) => ({ kind: "observation", value, ...about_(spec.observations, index, "observation") })),
    ...robot.action.map((value, index) => ({ kind: "action", value, ...about_(spec.actions, index, "action") })),
  ];
  const names = all.map((channel) => `${channel.kind}: ${channel.name}`);
  const body = $("channels").tBodies[0];
  if ([...body.rows].map((row) => row.dataset.channel).join("\n") !== names.join("\n")) {
    forgetChannels();
    names.slice(-robot.action.length).slice(0, 4).forEach((name) => selected.add(name));
    const texts = all.map(({ name, unit, kind, low, high }) => [name, "", unit, kind, number(low), number(high)]);
    listChannels(body, names, selected, () => drawChannels(names), texts);
  }
  all.forEach((channel, index) => {
    const shown = body.rows[index].cells[2];
    shown.textContent = number(channel.value);
    shown.className = outside(channel) ? "bad" : "";
  });
  const { times, rows } = channelHistory;
  times.push(time);
  rows.push(all.map((channel) => channel.value));
  if (times.length > about.history) { times.shift(); rows.shift(); }
  drawChannels(names);
}

// If a channel has no limit, low or high is null or undefined.
function outside({ value, low, high }) {
  return (low ?? -Infinity) > value || (high ?? Infinity) < value;
}

function drawChannels(names) {
  const chosen = names.map((name, index) => ({ name, index })).filter(({ name }) => selected.has(name));
  if (!chosen.length) return;
  channels.set(chosen.map(({ name }) => name), [channelHistory.times, ...chosen.map(({ index }) => channelHistory.rows.map((row) => row[index]))]);
}

function show(live) {
  $("problem").hidden = !live.problem;
  $("problem").textContent = live.problem;
  if (live.figures && "env_steps" in live.figures) {
    $("training").hidden = false;
    showFigures(live.figures);
  }
  if (trend.at(-1)?.time !== live.point.time) trend.push(live.point); // the history may hold this point already
  if (trend.length > about.history) trend.shift();
  showHistory();
  showNodes(live);
  showRobots(live);
  if (live.metrics !== metricsVersion) {
    metricsVersion = live.metrics;
    loadMetrics();
  }
}

function connect() {
  const stream = new EventSource("/events");
  stream.onopen = () => { $("connection").textContent = "live"; $("connection").className = "good"; };
  stream.addEventListener("history", (event) => { trend = JSON.parse(event.data); metricsVersion = ""; });
  stream.onmessage = (event) => show(JSON.parse(event.data));
  stream.onerror = () => {
    $("connection").textContent = "no connection to td3-robot dashboard; the page tries again. If you start td3-robot dashboard again, open its new address.";
    $("connection").className = "bad";
    if (stream.readyState === EventSource.CLOSED) {
      stream.close();
      setTimeout(connect, 2000);
    }
  };
}

const WATCHING = "You can only watch. To stop or command the robots, open the address that td3-robot dashboard printed after “operate:”.";
const QUESTIONS = {
  activate: "Activate? The policy then moves the robots.",
  load: "Load this policy? The robots use it from the next action on.",
  rollback: "Roll back? The robots use an older policy from the next action on.",
};

// Sends a command, and shows what the policy server and the robots answered.
async function act(verb) {
  if (QUESTIONS[verb] && !confirm(QUESTIONS[verb])) return;
  const begun = performance.now();
  const tell = (text, good) => { $("result").textContent = text; $("result").className = good === undefined ? "" : good ? "good" : "bad"; };
  tell(`${verb}: sent, no answer yet`);
  try {
    const body = JSON.stringify(verb === "load" ? { verb, policy: $("policy").value } : { verb });
    const answer = await fetch("/act", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    if (!answer.ok) return tell(`${verb}: ${await answer.text()}`, false);
    const { done, text, state, confirmed } = await answer.json();
    const robots = confirmed.length ? `, confirmed by ${confirmed.join(", ")}` : "";
    const server = state ? `; state of the policy server: ${state}` : "";
    tell(`${verb}: ${done ? "done" : `NOT done: ${text}`}${robots}${server} (${Math.round(performance.now() - begun)} ms)`, done);
  } catch (error) {
    tell(`${verb}: NO CONNECTION to td3-robot dashboard (${error.message}). Use the robot's own emergency stop.`, false);
  }
}

function allowActions() {
  const operator = about.role === "operator";
  for (const button of document.querySelectorAll("[data-verb]")) {
    button.disabled = !operator;
    button.title = operator ? "" : WATCHING;
    button.onclick = () => act(button.dataset.verb);
  }
  $("policy").disabled = !operator;
  $("why").textContent = operator
    ? "Commands go to the policy server and its robots. The emergency stop needs one click. It does not replace the robot's own emergency stop."
    : WATCHING;
}

async function start() {
  window.history.replaceState(null, "", "/"); // keep the token out of the browser's history and of screenshots
  about = await (await fetch("/about")).json();
  body.period = about.period_s;
  $("title").textContent = document.title = about.title;
  document.querySelector("nav").hidden = !about.recordings;
  $("robot").onchange = forgetChannels;
  allowActions();
  connect();
}

start();
