// The page of the recordings of a run or a folder of runs. All text from recordings goes into the page with textContent.
"use strict";

const KINDS = { fault: "#d32f2f", gap: "#e8710a", state: "#1976d2", command: "#2e9e4f", start: "#7b4fd0" }; // the colour of each kind
const events = new Chart("chart-events", { points: true, label: "s" });
const channels = new Chart("chart-channels", { label: "s" });
let name = ""; // name of the opened recording
let shown = null; // the shown robot with its channels
let selected = new Set();

const megabytes = (bytes) => (bytes / 1e6).toFixed(2);

async function loadList() {
  const answer = await fetch("/recordings/list");
  if (!answer.ok) return say(await answer.text(), "bad");
  const { title, home, recordings } = await answer.json();
  $("title").textContent = document.title = title;
  $("home").textContent = home;
  say(recordings.length ? `${recordings.length} recordings` : "no recordings yet; td3-robot record makes one");
  const body = $("files").tBodies[0];
  body.replaceChildren();
  for (const recording of recordings) {
    const row = body.insertRow();
    row.dataset.recording = recording.name;
    cell(row, recording.name, "th").scope = "row";
    cell(row, megabytes(recording.bytes));
    const button = cell(row, "").appendChild(document.createElement("button"));
    button.textContent = "Open";
    button.setAttribute("aria-label", `Open ${recording.name}`);
    button.onclick = () => open(recording.name);
  }
}

// Reads a recording. If robot is empty, the server selects the first robot.
async function open(wanted, robot = "") {
  say(`reading ${wanted}`);
  for (const button of document.querySelectorAll("#files button, #robot")) button.disabled = true;
  try {
    const answer = await fetch(`/recordings/content?${new URLSearchParams({ name: wanted, robot })}`);
    if (!answer.ok) return say(await answer.text(), "bad");
    const report = await answer.json();
    if (name !== wanted || !robot) selected = new Set();
    name = wanted;
    $("opened").hidden = false;
    showFacts(report);
    showTopics(report.topics);
    showEvents(report);
    showRobot(report);
    await askReplay();
    say(`opened ${name}`, "good");
  } catch (error) {
    lost(error);
  } finally {
    for (const button of document.querySelectorAll("#files button, #robot")) button.disabled = false;
  }
}

function showFacts(report) {
  const versions = report.policy_versions, about = report.metadata;
  $("h-facts").textContent = name;
  const facts = [["begin (UTC)", report.begin.slice(0, 19).replace("T", " ")], ["duration (s)", report.duration_s], ["messages", report.messages], ["MB", megabytes(report.bytes)],
    ["task", about.task ?? "–"], ["recorded by td3-robot", about["td3-robot"] ?? "–"],
    ["robot steps", Object.values(report.robot_steps).reduce((sum, count) => sum + count, 0)], ["episodes that ended", report.robot_steps.terminated + report.robot_steps.truncated],
    ["policies", versions.count], ["steps without an action in time", report.fallback_steps], ["steps under an operator", report.operator_steps],
    ["faults", report.faults.reduce((sum, fault) => sum + fault.count, 0)]];
  showTiles($("facts"), facts, 6);
  $("written").hidden = !report.being_written;
  $("damages").replaceChildren(...report.damages.map((damage) => {
    const item = document.createElement("li");
    item.textContent = `Damaged at ${damage}`;
    return item;
  }));
}

function showTopics(topics) {
  const body = $("topics").tBodies[0];
  body.replaceChildren();
  for (const [topic, stream] of Object.entries(topics)) {
    const row = body.insertRow();
    row.dataset.topic = topic;
    cell(row, topic, "th").scope = "row";
    for (const text of [number(stream.count), number(stream.rate_hz), megabytes(stream.bytes)]) cell(row, text);
    for (const count of [stream.gaps, stream.missing]) cell(row, number(count), "td", count ? "bad" : "");
    cell(row, number(stream.longest_s));
  }
}

function showEvents(report) {
  const found = report.events;
  const left = report.events_left_out ? ` The page leaves out ${report.events_left_out} more.` : "";
  $("events-facts").textContent = (found.length ? `${found.length} events.` : "No events.") + left;
  const kinds = Object.keys(KINDS).filter((kind) => found.some((event) => event.kind === kind));
  events.set(kinds, [found.map((event) => event.time_s), ...kinds.map((kind, row) => found.map((event) => (event.kind === kind ? row : null)))],
    { colours: kinds.map((kind) => KINDS[kind]), range: [0, report.duration_s] });
  const body = $("events").tBodies[0];
  body.replaceChildren();
  for (const event of found) {
    const row = body.insertRow();
    cell(row, event.time_s.toFixed(3));
    cell(row, event.kind, "td", event.kind === "fault" || event.kind === "gap" ? "bad" : "");
    cell(row, event.text, "td", "long");
  }
}

function showRobot({ robots, robot }) {
  $("robot").replaceChildren(...robots.map((one) => new Option(one, one)));
  shown = robot;
  const body = $("channels").tBodies[0];
  $("robot-facts").textContent = robot ? `${number(robot.steps)} Steps.${robot.every > 1 ? ` The chart shows one in ${robot.every} Steps.` : ""}` : "The recording has no Step.";
  $("robot").parentElement.hidden = !robot;
  if (!robot) {
    body.replaceChildren();
    return channels.set([], [[]]);
  }
  $("robot").value = robot.name;
  const names = robot.channels.map((channel) => `${channel.kind}: ${channel.name}`);
  selected = new Set(names.filter((one) => selected.has(one)));
  if (!selected.size) names.slice(0, 4).forEach((one) => selected.add(one));
  listChannels(body, names, selected, drawChannels, robot.channels.map(({ name, kind, unit }) => [name, kind, unit]));
  drawChannels();
}

function drawChannels() {
  const drawn = shown.channels.filter((channel) => selected.has(`${channel.kind}: ${channel.name}`));
  channels.set(drawn.map((channel) => `${channel.kind}: ${channel.name}`), [shown.time_s, ...drawn.map((channel) => channel.values)]);
}

// Shows the newest replay, even if another viewer started it.
// While the replay runs, this function asks the server again.
function showReplay(replay) {
  $("replay").disabled = replay.running;
  const of = replay.name === name ? "" : `${replay.name}: `;
  if (!replay.name) $("replayed").textContent = "";
  else if (replay.running) $("replayed").textContent = `${of}the replay is running`;
  else $("replayed").textContent = `${replay.text}exit code ${replay.code}: ${verdict(replay.code)}`;
  $("replayed").className = replay.running || !replay.name ? "" : replay.code === 0 ? "good" : "bad";
  if (replay.running) setTimeout(poll, 500);
}

async function askReplay() {
  const answer = await fetch("/recordings/replay");
  if (!answer.ok) throw new Error(await answer.text());
  showReplay(await answer.json());
}

function poll() {
  askReplay().catch((error) => { lost(error); setTimeout(poll, 2000); });
}

const verdict = (code) => (code === 0 ? "all compared outputs are as recorded" : code === 1 ? "an output differs, or nothing could be checked" : "the recording could not be replayed");

async function replay() {
  $("replay").disabled = true;
  const answer = await fetch(`/recordings/replay?${new URLSearchParams({ name })}`, { method: "POST" });
  if (answer.ok) return showReplay(await answer.json());
  $("replayed").textContent = await answer.text();
  $("replayed").className = "bad";
  $("replay").disabled = false;
}

window.history.replaceState(null, "", "/recordings"); // keep the token out of the browser's history and of screenshots
$("again").onclick = () => loadList().catch(lost);
$("replay").onclick = () => replay().catch((error) => { lost(error); $("replay").disabled = false; });
$("robot").onchange = () => open(name, $("robot").value);
loadList().catch(lost);
