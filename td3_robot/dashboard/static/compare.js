// The page of td3-robot dashboard --runs: curves, differences, scores and videos of all runs in a folder.
"use strict";

const compared = new Chart("chart-compare");

async function load() {
  const answer = await fetch("/compare");
  if (!answer.ok) return say(await answer.text(), "bad");
  const { title, runs, left_out, keys, bands } = await answer.json();
  $("title").textContent = document.title = title;
  say(`${runs.length} runs` + (left_out ? `, ${left_out} more not shown` : ""));
  showBands(bands.filter((band) => band.env_steps.length));
  showRuns(runs, keys);
  showVideos(runs);
}

function showBands(bands) {
  if (!bands.length) return;
  const labels = [], tables = [], fills = [], colours = [];
  bands.forEach((band, index) => {
    const colour = COLOURS[index % COLOURS.length];
    labels.push(band.label, "", "");
    tables.push([band.env_steps, band.mean, band.high, band.low]);
    colours.push(colour, colour + "60", colour + "60");
    fills.push({ series: [3 * index + 2, 3 * index + 3], fill: colour + "30" });
  });
  compared.set(labels, uPlot.join(tables), { bands: fills, colours });
}

function showRuns(runs, keys) {
  const head = $("runs").tHead, body = $("runs").tBodies[0];
  head.replaceChildren();
  body.replaceChildren();
  const top = head.insertRow();
  for (const name of ["run", "last return", "std over episodes", "environment steps", ...keys]) cell(top, name, "th").scope = "col";
  for (const run of runs) {
    const row = body.insertRow();
    row.dataset.run = run.name;
    cell(row, run.name, "th").scope = "row";
    for (const value of [run.score, run.score_std, run.env_steps]) cell(row, number(value, 6));
    for (const key of keys) cell(row, JSON.stringify(run.config[key] ?? null));
  }
}

function showVideos(runs) {
  const players = runs.flatMap((run) => run.videos.map((video) => {
    const figure = document.createElement("figure");
    cell(figure, `${run.name}: ${video}`, "figcaption");
    const player = figure.appendChild(document.createElement("video"));
    Object.assign(player, { controls: true, preload: "metadata", src: `/video/${encodeURIComponent(run.name)}/${encodeURIComponent(video)}` });
    return figure;
  }));
  $("players").replaceChildren(...players);
  $("videos").hidden = !players.length;
}

window.history.replaceState(null, "", "/"); // keep the token out of the browser's history and of screenshots
$("again").onclick = () => load().catch(lost);
load().catch(lost);
