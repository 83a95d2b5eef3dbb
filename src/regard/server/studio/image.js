/* Images: the field that takes one, and maps laid over one (docs/maps.md). A plain script with one global, for view.js
   and app.js. */
"use strict";

const RegardImage = (() => {
  /** How dark it is where nobody looks, and the pixels of a side of what is drawn. */
  const SHADE = 0.8, SIDE = 512;

  /** Where a pixel lies among the middles of cells: the two next to it, and how far it is on the way. */
  function between(pixel, pixels, cells) {
    const at = Math.min(Math.max(((pixel + 0.5) * cells) / pixels - 0.5, 0), cells - 1);
    const first = Math.min(Math.floor(at), Math.max(cells - 2, 0));
    return [first, Math.min(first + 1, cells - 1), at - first];
  }

  /** Weights of the cells of a grid, row by row, over an image, pixel by pixel: bilinear, as regard.explain draws it. */
  function spread(weights, [rows, columns], height, width) {
    const out = new Float32Array(height * width);
    const across = Array.from({ length: width }, (_, pixel) => between(pixel, width, columns));
    for (let line = 0; line < height; line++) {
      const [top, bottom, down] = between(line, height, rows);
      for (let pixel = 0; pixel < width; pixel++) {
        const [left, right, way] = across[pixel];
        const upper = (1 - way) * weights[top * columns + left] + way * weights[top * columns + right];
        const lower = (1 - way) * weights[bottom * columns + left] + way * weights[bottom * columns + right];
        out[line * width + pixel] = (1 - down) * upper + down * lower;
      }
    }
    return out;
  }

  /** A transparent picture that is dark where the weights are small. */
  function shade(weights, grid, width, height) {
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    const pixels = new ImageData(width, height), most = Math.max(...weights, 1e-9);
    spread(weights, grid, height, width).forEach((weight, at) => {
      pixels.data[4 * at + 3] = Math.round(255 * SHADE * (1 - weight / most));
    });
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    return canvas;
  }

  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

  /** An image, and over it where one row of a map looked. A cell of it can be pointed at, by mouse or by keys; one that
      looks itself can be chosen. */
  class Overlay {
    /** `image` is that of a tree; `tools` are those of the viewer; `onpoint(axis, cell, spoken)` and `onchoose(axis, cell)`
        hear of cells, `onrest()` that none is pointed at any more. */
    constructor(image, tools, { onpoint, onchoose, onrest }) {
      Object.assign(this, { image, tools, shown: null, cell: null });
      const scale = SIDE / Math.max(image.width, image.height), { make } = tools;
      const [width, height] = [image.width, image.height].map((side) => Math.max(1, Math.round(side * scale)));
      this.canvas = make("canvas", { width, height, tabindex: 0, role: "img" });
      this.caption = make("figcaption", { class: "note" });
      this.element = make("figure", { class: "overlay" }, this.canvas, this.caption);
      this.picture = new Image();
      this.picture.addEventListener("load", () => this.draw());
      this.picture.src = image.data;
      const over = (event) => { const cell = this.find(event); if (cell !== this.cell) this.point(cell, false, onpoint); };
      this.canvas.addEventListener("pointermove", over);
      this.canvas.addEventListener("pointerleave", () => { this.cell = null; onrest(); });
      this.canvas.addEventListener("click", (event) => this.axis && onchoose(this.axis, this.find(event)));
      this.canvas.addEventListener("keydown", (event) => this.key(event, onpoint, onchoose));
      this.canvas.addEventListener("blur", () => { if (this.cell != null) { this.cell = null; onrest(); } });
    }

    get grid() { return this.image.grids[this.axis]; }

    /** The cell under the mouse. */
    find({ offsetX, offsetY }) {
      if (!this.axis) return null;
      const [rows, columns] = this.grid, { clientWidth, clientHeight } = this.canvas;
      const place = (at, side, count) => Math.min(Math.max(Math.floor((at / side) * count), 0), count - 1);
      return place(offsetY, clientHeight, rows) * columns + place(offsetX, clientWidth, columns);
    }

    point(cell, spoken, onpoint) {
      if (cell == null) return;
      this.cell = cell;
      onpoint(this.axis, cell, spoken);
      this.draw();
    }

    /** Arrows move from cell to cell, Enter chooses one. */
    key(event, onpoint, onchoose) {
      if (!this.axis) return;
      const step = STEPS[event.key], [rows, columns] = this.grid, from = this.cell ?? this.asked ?? 0;
      if (step) {
        const row = Math.min(Math.max(Math.floor(from / columns) + step[0], 0), rows - 1);
        const column = Math.min(Math.max((from % columns) + step[1], 0), columns - 1);
        this.point(row * columns + column, true, onpoint);
      } else if (event.key === "Enter" || event.key === " ") onchoose(this.axis, from);
      else return;
      event.preventDefault();
    }

    /** Show where one row of a map looked: `axis` is that of its columns, `asked` the cell that looks, if it is one.
        Without weights, they are on their way. */
    show(name, axis, weights, asked = null) {
      const { say, percent } = this.tools;
      Object.assign(this, { axis, weights, asked });
      this.caption.textContent = weights ? say("over", { token: name, percent: percent(Math.max(...weights)) }) : say("waiting");
      this.canvas.setAttribute("aria-label", this.caption.textContent);
      this.draw();
    }

    draw() {
      const { width, height } = this.canvas, pen = this.canvas.getContext("2d");
      pen.clearRect(0, 0, width, height);
      pen.drawImage(this.picture, 0, 0, width, height);
      if (!this.axis) return;
      if (this.weights) pen.drawImage(shade(this.weights, this.grid, width, height), 0, 0);
      this.rule(pen, width, height);
      const { mark, accent } = this.tools.colours();
      if (this.asked != null) this.frame(pen, this.asked, mark);
      if (this.cell != null && this.cell !== this.asked) this.frame(pen, this.cell, accent);
    }

    /** The lines of the grid; white and black, to be seen on any image. */
    rule(pen, width, height) {
      const [rows, columns] = this.grid, lines = new Path2D();
      for (let row = 1; row < rows; row++) {
        lines.moveTo(0, (row * height) / rows);
        lines.lineTo(width, (row * height) / rows);
      }
      for (let column = 1; column < columns; column++) {
        lines.moveTo((column * width) / columns, 0);
        lines.lineTo((column * width) / columns, height);
      }
      for (const [colour, thick] of [["rgb(0 0 0 / 0.25)", 2], ["rgb(255 255 255 / 0.4)", 1]]) {
        pen.strokeStyle = colour;
        pen.lineWidth = thick;
        pen.stroke(lines);
      }
    }

    frame(pen, cell, colour) {
      const [rows, columns] = this.grid, { width, height } = this.canvas, [wide, high] = [width / columns, height / rows];
      pen.strokeStyle = colour;
      pen.lineWidth = 3;
      pen.strokeRect((cell % columns) * wide, Math.floor(cell / columns) * high, wide, high);
    }
  }

  /** A field for an image: a button of the browser's that opens a file, and what was chosen. Images that are dropped
      anywhere on the page, or pasted, are taken, too, as long as the field is there. Its `data` is a data URI. */
  function field(make, id, name, onimage) {
    const input = make("input", { id, name, type: "file", accept: "image/*" });
    const preview = make("img", { alt: "", hidden: true });
    const box = make("div", { class: "drop" }, input, preview);
    const here = () => box.isConnected;
    input.data = "";
    const take = (file) => {
      if (!file) return;
      const reader = new FileReader();
      reader.addEventListener("load", () => {
        input.data = reader.result;
        preview.hidden = false;
        preview.src = input.data;
        onimage();
      });
      reader.readAsDataURL(file);
    };
    preview.addEventListener("error", () => { preview.hidden = true; });  // the server says what is wrong with it
    input.addEventListener("change", () => take(input.files[0]));
    const brings = (event) => here() && [...event.dataTransfer.types].includes("Files");
    const drag = (on) => (event) => {
      if (!brings(event)) return;
      event.preventDefault();
      box.classList.toggle("over", on);
    };
    document.addEventListener("dragover", drag(true));
    document.addEventListener("dragleave", drag(false));
    document.addEventListener("drop", (event) => {
      if (!brings(event)) return;
      drag(false)(event);
      input.value = "";  // of another file
      take(event.dataTransfer.files[0]);
    });
    document.addEventListener("paste", (event) => {
      if (here() && event.clipboardData.files.length) take(event.clipboardData.files[0]);
    });
    return box;
  }

  return { Overlay, field, spread };
})();
