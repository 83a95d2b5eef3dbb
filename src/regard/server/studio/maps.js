/* The numbers of maps, in every form that a tree has them in (docs/maps.md): all weights, blocks, the largest of each
   row, or a picture. A plain script with one global, for view.js. */
"use strict";

const RegardMaps = (() => {
  const range = (count) => Array.from({ length: count }, (_, index) => index);

  /** What base64 stands for; a plain loop, for it may be long. */
  function bytes(text) {
    const characters = atob(text), found = new Uint8Array(characters.length);
    for (let index = 0; index < found.length; index++) found[index] = characters.charCodeAt(index);
    return found;
  }
  const floats = (text) => new Float32Array(bytes(text).buffer);

  const decoded = new WeakMap();
  /** What was decoded of a map once, by a name. */
  function kept(entry, name, make) {
    if (!decoded.has(entry)) decoded.set(entry, {});
    return (decoded.get(entry)[name] ??= make());
  }
  const forget = (entry) => decoded.delete(entry);

  /** The weight that the largest byte of a head stands for. */
  const scaleOf = (entry, head) => (head === "mean" ? Math.max(...(entry.scale ?? [1])) : entry.scale?.[head] ?? 1);
  const stored = (entry) => entry.pooled ?? entry.shape.slice(1);
  const tileOf = (entry) => (entry.pooled ? entry.tile : [1, 1]);
  /** Whether a map is a picture and nothing more. */
  const isPicture = (entry) => Boolean(entry.pooled && !entry.top && !entry.blocks?.weights);
  /** The mean of the same numbers of all heads. */
  function meanOf(entry, numbers) {
    const [first, ...others] = range(entry.shape[0]).map(numbers), mean = Float32Array.from(first);
    for (const head of others) head.forEach((weight, index) => { mean[index] += weight; });
    return mean.map((sum) => sum / entry.shape[0]);
  }

  /** Bytes in base64 as weights of a head; or numbers, row by row. */
  function scaled(entry, head, part) {
    if (typeof part !== "string") return new Float32Array(part.flat());
    const one = scaleOf(entry, head) / 255;
    return Float32Array.from(bytes(part), (byte) => byte * one);
  }

  /** The weights of one head, or the mean of all, row-major in the stored shape. */
  const weightsOf = (entry, head) => kept(entry, `weights ${head}`, () => (head === "mean"
    ? meanOf(entry, (one) => weightsOf(entry, one)) : scaled(entry, head, (entry.packed ?? entry.heads)[head])));

  // --- blocks --------------------------------------------------------------------------------------------------------

  /** Which blocks each block of rows sees, as sets. */
  const setsOf = (entry) => kept(entry, "sets", () => entry.blocks.seen.map((row) => new Set(row)));

  /** Whether a row may look at a column, as far as blocks say. */
  function seen(entry, row, column) {
    if (!entry.blocks) return true;
    const { size, width, causal } = entry.blocks;
    if ((causal && column > row) || (width != null && Math.abs(row - column) > width)) return false;
    return setsOf(entry)[Math.floor(row / size)].has(Math.floor(column / size));
  }

  /** Whether anything is seen in each tile, row-major; by blocks. */
  function seenTiles(entry, [high, wide]) {
    const [, rows, columns] = entry.shape, { size, seen: blocks, width, causal } = entry.blocks;
    const across = Math.ceil(columns / wide), found = new Uint8Array(Math.ceil(rows / high) * across);
    const parts = (block, side, tile) => [Math.floor((block * size) / tile),
      Math.floor((Math.min(side, (block + 1) * size) - 1) / tile)];
    blocks.forEach((row, own) => {
      const [top, bottom] = parts(own, rows, high);
      for (const block of row) {
        const [left, right] = parts(block, columns, wide);
        for (let y = top; y <= bottom; y++) found.fill(1, y * across + left, y * across + right + 1);
      }
    });
    return found.map((one, at) => {
      const top = Math.floor(at / across) * high, left = (at % across) * wide;
      const bottom = Math.min(rows, top + high) - 1, right = Math.min(columns, left + wide) - 1;
      const hidden = (causal && left > bottom) || (width != null && Math.max(left - bottom, top - right) > width);
      return one && !hidden;
    });
  }

  /** Where each row of blocks begins in their weights, and how many columns a row of each has. */
  function placesOf(entry) {
    const { size, seen: blocks } = entry.blocks, [, rows, columns] = entry.shape;
    const length = (block) => Math.min(columns, (block + 1) * size) - block * size;
    let at = 0;
    return blocks.map((row, own) => {
      const count = row.reduce((sum, block) => sum + length(block), 0), begin = at;
      at += count * Math.min(size, rows - own * size);
      return { begin, count, columns: row.flatMap((block) => range(length(block)).map((one) => block * size + one)) };
    });
  }

  function blockRow(entry, head, row) {
    const { size, weights } = entry.blocks, own = Math.floor(row / size);
    const { begin, count, columns } = kept(entry, "places", () => placesOf(entry))[own];
    const at = begin + (row - own * size) * count;
    const all = kept(entry, `blocks ${head}`, () => scaled(entry, head, weights[head]));
    return { columns, weights: all.subarray(at, at + count), left: 0 };
  }

  // --- the largest of each row ----------------------------------------------------------------------------------------

  /** The columns and weights that are known of a head, and what is left out of each row. */
  const topOf = (entry, head) => kept(entry, `top ${head}`, () => {
    const { columns, weights, left } = entry.top, one = scaleOf(entry, head) / 65535;
    if (typeof weights[head] !== "string")
      return { columns: columns[head].flat(), weights: weights[head].flat(), left: left[head] };
    const halves = (text) => new Uint16Array(bytes(text).buffer);
    const places = entry.shape[2] <= 65536 ? halves(columns[head]) : new Uint32Array(bytes(columns[head]).buffer);
    const shares = Float32Array.from(halves(left[head]), (number) => number / 65535);
    return { columns: places, weights: Float32Array.from(halves(weights[head]), (number) => number * one), left: shares };
  });

  function topRow(entry, head, row) {
    const { count } = entry.top, { columns, weights, left } = topOf(entry, head), at = row * count;
    const some = weights.slice(at, at + count), known = some.findIndex((weight) => !weight);
    const end = at + (known < 0 ? count : known);  // a weight of 0 is none
    return { columns: Array.from(columns.slice(at, end)), weights: weights.slice(at, end), left: left[row] };
  }

  // --- rows, columns, cells -------------------------------------------------------------------------------------------

  /** What is known of one row of a head, or of the mean of all: weights, of which columns (null: of all of them), and
      the share of the row that is not among them. Null if there is only a picture. */
  function rowOf(entry, head, row) {
    if (isPicture(entry)) return null;
    if (!entry.pooled) {
      const [, , columns] = entry.shape;
      return { columns: null, weights: weightsOf(entry, head).subarray(row * columns, (row + 1) * columns), left: 0 };
    }
    const one = entry.top ? topRow : blockRow;
    if (head !== "mean") return one(entry, head, row);
    const parts = range(entry.shape[0]).map((other) => one(entry, other, row)), sums = new Map();
    for (const { columns, weights } of parts)
      columns.forEach((column, at) => sums.set(column, (sums.get(column) ?? 0) + weights[at] / parts.length));
    const left = parts.reduce((sum, part) => sum + part.left / parts.length, 0);
    return { columns: [...sums.keys()], weights: Float32Array.from(sums.values()), left };
  }

  /** The weight in one cell, by its true row and column; of what is not known, 0. */
  function cellOf(entry, head, row, column) {
    if (!entry.pooled) return weightsOf(entry, head)[row * entry.shape[2] + column];
    const found = rowOf(entry, head, row), at = found ? found.columns.indexOf(column) : -1;
    return at < 0 ? 0 : found.weights[at];
  }

  /** Who looks at a column, and how much: as `rowOf`. */
  function columnOf(entry, head, column) {
    const [heads, rows] = entry.shape;
    if (isPicture(entry)) return null;
    if (!entry.top) {
      const may = range(rows).filter((row) => !entry.pooled || seen(entry, row, column));
      return { columns: may, weights: Float32Array.from(may, (row) => cellOf(entry, head, row, column)), left: 0 };
    }
    const sums = new Map(), { count } = entry.top, among = head === "mean" ? range(heads) : [head];
    for (const one of among) {
      const { columns, weights } = topOf(entry, one);
      for (let at = 0; at < columns.length; at++) {
        if (columns[at] !== column || !weights[at]) continue;
        const row = Math.floor(at / count);
        sums.set(row, (sums.get(row) ?? 0) + weights[at] / among.length);
      }
    }
    return { columns: [...sums.keys()], weights: Float32Array.from(sums.values()), left: 0 };
  }

  /** The places of the largest weights, largest first. */
  function strongest(weights, count) {
    const best = [];
    for (let at = 0; at < weights.length; at++) {
      if (best.length === count && weights[at] <= weights[best.at(-1)]) continue;
      let place = best.length;
      while (place && weights[best[place - 1]] < weights[at]) place--;
      best.splice(place, 0, at);
      best.length = Math.min(best.length, count);
    }
    return best;
  }

  /** The weights of some rows and columns, row-major. */
  function cells(entry, head, { row, column, rows, columns }) {
    const found = new Float32Array(rows * columns);
    for (let y = 0; y < rows; y++) {
      const known = rowOf(entry, head, row + y);
      known?.weights.forEach((weight, at) => {
        const x = (known.columns ? known.columns[at] : at) - column;
        if (x >= 0 && x < columns) found[y * columns + x] = weight;
      });
    }
    return found;
  }

  /** Weights in larger tiles: each the largest of those it stands for. */
  function pool(values, rows, columns, [high, wide]) {
    const across = Math.ceil(columns / wide), small = new Float32Array(Math.ceil(rows / high) * across);
    for (let row = 0; row < rows; row++) {
      const base = Math.floor(row / high) * across;
      for (let column = 0; column < columns; column++) {
        const index = base + Math.floor(column / wide);
        small[index] = Math.max(small[index], values[row * columns + column]);
      }
    }
    return small;
  }

  // --- the equation ---------------------------------------------------------------------------------------------------

  /** The scores that are known here, by name: a formula, and what one component of query and key adds to it. */
  const SCORES = {
    dot: { formula: "q · k", term: (q, k) => q * k },
    "scaled dot": { formula: "q · k / √d", term: (q, k) => q * k },
    additive: { formula: "v · tanh(q + k)", term: (q, k, v) => v * Math.tanh(q + k) },
  };
  /** The normalizers that are known here, by name: the scores of what may be seen -> weights. */
  const NORMALIZERS = {
    softmax(scores) {
      const highest = Math.max(...scores), raised = scores.map((score) => Math.exp(score - highest));
      const total = raised.reduce((sum, one) => sum + one, 0);
      return raised.map((one) => one / total);
    },
  };

  /** The equation for one query and head, from a map's vectors: every step of it. Where it is not known here, the
      weights are the map's. */
  function calculate(entry, head, row) {
    const [heads, rows, columns] = entry.shape, given = entry.vectors, { size } = given;
    const keys = floats(given.keys), values = floats(given.values), wide = values.length / heads / columns;
    const part = (all, index, length) => all.subarray(index * length, (index + 1) * length);
    const query = part(floats(given.queries), head * rows + row, size);
    const steps = range(columns).map((column) => {
      const at = head * columns + column;
      return { column, key: part(keys, at, size), value: part(values, at, wide) };
    });
    const known = weigh(entry, head, row, query, steps);
    for (const step of steps) {
      if (!known) Object.assign(step, { weight: cellOf(entry, head, row, step.column), hidden: false });
      step.product = step.value.map((number) => number * step.weight);
    }
    const context = range(wide).map((i) => steps.reduce((sum, step) => sum + step.product[i], 0));
    return { query, steps, context, known };
  }

  /** Give every step its score and weight, if score and normalizer are known; whether the weights are the map's. */
  function weigh(entry, head, row, query, steps) {
    const { score, normalizer, size, slopes, causal, hidden, vector } = entry.vectors;
    const compare = SCORES[score], normalize = NORMALIZERS[normalizer], learned = vector && floats(vector);
    if (!compare || !normalize) return false;
    for (const step of steps) {
      step.raw = query.reduce((sum, q, i) => sum + compare.term(q, step.key[i], learned?.[i]), 0);
      step.scaled = score === "scaled dot" ? step.raw / Math.sqrt(size) : step.raw;
      step.score = step.scaled + (slopes ? slopes[head] * Math.abs(step.column - row) : 0);
      step.hidden = (causal && step.column > row) || Boolean(hidden?.includes(step.column))
        || !seen(entry, row, step.column);
      step.weight = 0;
    }
    const shown = steps.filter((step) => !step.hidden);
    normalize(shown.map((step) => step.score)).forEach((weight, index) => { shown[index].weight = weight; });
    const same = (step) => Math.abs(step.weight - cellOf(entry, head, row, step.column)) <= 1 / 255;  // a byte each
    return Boolean(entry.pooled) || steps.every(same);
  }

  return {
    range, kept, forget, stored, tileOf, isPicture, weightsOf, seen, seenTiles, rowOf, cellOf,
    columnOf, strongest, cells, pool, SCORES, calculate,
  };
})();
