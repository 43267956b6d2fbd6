// Draws a robot as capsules. A robot that faces along x is seen from its right side, a little from behind and from above.
"use strict";

const AROUND = 0.45, ABOVE = 0.25; // rad
const ROOM = 1.8; // height of the canvas, as a multiple of the robot's size

class Robot {
  constructor(id, period) {
    this.canvas = $(id);
    this.period = period; // seconds between two deliveries of frames
    this.timers = [];
    this.forget();
  }

  // Cancels the frames that are not drawn yet, and forgets the size. Call this before you draw another robot.
  forget() {
    this.timers.forEach(clearTimeout);
    this.frame = null;
    // The robot's size in m, from all frames since forget(). The size is the larger of two values: the largest distance
    // of a part from the torso along x or y, and the largest height of a part above the floor.
    this.size = 0;
  }

  // Shows the frames one after the other within a period. If the user prefers reduced motion, it shows only the last frame.
  play({ radii, frames }) {
    this.timers.forEach(clearTimeout);
    this.radii = radii;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const shown = still ? frames.slice(-1) : frames;
    this.timers = shown.map((frame, index) => setTimeout(() => this.draw(frame), (1000 * this.period * index) / shown.length));
  }

  draw(frame) {
    this.frame = frame;
    const { canvas } = this, ratio = devicePixelRatio, style = getComputedStyle(document.body);
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const pen = canvas.getContext("2d"), [cx, cy] = [(frame[0] + frame[3]) / 2, (frame[1] + frame[4]) / 2]; // the middle of the first shape, which is usually the torso
    for (let point = 0; point < frame.length; point += 3) {
      const radius = this.radii[Math.floor(point / 6)];
      this.size = Math.max(this.size, radius + Math.max(Math.abs(frame[point] - cx), Math.abs(frame[point + 1] - cy), frame[point + 2]));
    }
    const scale = canvas.height / (ROOM * this.size);
    const place = (x, y, z) => {
      const ahead = x - cx, left = y - cy;
      const across = ahead * Math.cos(AROUND) - left * Math.sin(AROUND), depth = ahead * Math.sin(AROUND) + left * Math.cos(AROUND);
      return [canvas.width / 2 + scale * across, canvas.height * 0.85 - scale * (z * Math.cos(ABOVE) + depth * Math.sin(ABOVE)), depth];
    };
    const line = (from, to, width, colour) => {
      pen.strokeStyle = colour;
      pen.lineWidth = width;
      pen.beginPath();
      pen.moveTo(from[0], from[1]);
      pen.lineTo(to[0], to[1]);
      pen.stroke();
    };
    pen.lineCap = "round";
    const grid = style.getPropertyValue("--line"), reach = Math.ceil(canvas.width / scale / 2) + 1;
    for (let x = Math.floor(cx) - reach; x <= cx + reach; x += 0.5) line(place(x, cy - 2, 0), place(x, cy + 2, 0), ratio * (Number.isInteger(x) ? 2 : 1), grid);
    for (let y = Math.ceil(cy) - 2; y <= cy + 2; y += 1) line(place(cx - reach, y, 0), place(cx + reach, y, 0), ratio, grid);
    const parts = this.radii.map((radius, part) => {
      const from = place(...frame.slice(6 * part, 6 * part + 3)), to = place(...frame.slice(6 * part + 3, 6 * part + 6));
      return { from, to, radius, depth: (from[2] + to[2]) / 2 };
    });
    parts.sort((one, other) => other.depth - one.depth);
    for (const { from, to, radius, depth } of parts) {
      const light = Math.round(Math.max(30, Math.min(70, 52 - 25 * depth)));
      line(from, to, 2 * scale * radius + 2 * ratio, `hsl(24 60% ${light - 14}%)`);
      line(from, to, 2 * scale * radius, `hsl(30 75% ${light}%)`);
    }
    canvas.setAttribute("aria-label", `The robot, seen from the side. Its torso is ${((frame[2] + frame[5]) / 2).toFixed(2)} m above the floor.`);
  }
}
