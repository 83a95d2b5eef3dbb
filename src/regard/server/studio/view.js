/* The viewer: draws what a model looked at, from the tree that regard.look makes. A plain script with one global; the
   studio uses it, and so does the file that stands alone, where it is inlined and finds its tree in #tree. */
"use strict";

const Regard = (() => {
  /** Every word of the viewer, one table a language; the studio adds its own. What differs between tasks is not here:
      a task brings its own words, in the form of its tree. */
  const words = {
    en: {
      answer: "Answer", others: "Best answers",
      looks: "{token} looks at", seen: "Who looks at {token}", probability: "{token}: probability {percent}",
      map: "Map", head: "Head", heads: "Heads", mean: "mean of all", row: "Row", layer: "Layer {layer}",
      matrix: "Matrix", arcs: "Parents as arcs over the words", hard: "mark the strongest of each row", save: "Save as {format}",
      "self maps": "Self-attention", "cross maps": "Cross-attention", "spatial maps": "Spatial attention",
      "chain maps": "Chain attention", "tree maps": "Tree attention", "matching maps": "Matching attention",
      classes: "Classes", "no answer": "none of the classes",
      "look at": "Look at {text}",
      thumb: "{map}, head {head}. Entropy {entropy} bits. {distance}", distance: "Mean distance {distance} tokens.",
      bits: "{entropy} bits", far: "{distance} away",
      under: "Under each head: its entropy, and how far it looks on average.",
      cell: "row {row} {query} looks at column {column} {key}: {percent}",
      keys: "Rows look at columns. Arrow keys move, Enter keeps a row.",
      pooled: "Shown smaller, {rows} × {columns}: each cell is the largest of those it stands for.",
      blind: "This model has no attention to look at.", calculator: "Calculator",
      story: "{token} asks with its query q. Each key answers with a score; softmax turns the scores into weights "
        + "that sum to 1; the context is the sum of the values, each times its weight.",
      opaque: "{token} asks with its query q. This page cannot recompute how this attention weighs the keys: the "
        + "weights are those of the map. The context is the sum of the values, each times its weight.",
      query: "query q", key: "key k", value: "value v", values: "values", product: "weight × v", context: "context = sum",
      mask: "mask", masked: "hidden", weight: "weight", bias: "+ distance", token: "looks at",
      scale: "÷ √{size}", all: "Show all {count}",
      strongest: "The {count} strongest of {total}.", absent: "The vectors of this map are not in this file.",
      first: "Shown for head 1: a mean of heads has no query of its own.", waiting: "One moment …",
      failed: "That did not work: {reason}", language: "Language", theme: "Light or dark",
      score: "score {score}", flags: "Careful",
    },
    ko: {
      answer: "답", others: "가장 좋은 답",
      looks: "{token}이(가) 보는 곳", seen: "{token}을(를) 보는 토큰", probability: "{token}: 확률 {percent}",
      map: "맵", head: "헤드", heads: "헤드", mean: "모든 헤드의 평균", row: "행", layer: "{layer}층", matrix: "행렬",
      arcs: "단어 위의 호로 나타낸 부모",
      hard: "행마다 가중치가 가장 큰 곳 표시", save: "{format} 파일로 저장",
      "self maps": "셀프 어텐션", "cross maps": "크로스 어텐션", "spatial maps": "공간 어텐션",
      "chain maps": "체인 어텐션", "tree maps": "트리 어텐션", "matching maps": "매칭 어텐션",
      classes: "클래스", "no answer": "해당하는 클래스 없음", "look at": "{text} 들여다보기",
      thumb: "{map}, 헤드 {head}. 엔트로피 {entropy}비트. {distance}", distance: "평균 거리 {distance}토큰.",
      bits: "{entropy}비트", far: "거리 {distance}", under: "헤드 아래의 수: 엔트로피와 평균 거리.",
      cell: "{row}행 {query} → {column}열 {key}: {percent}",
      keys: "행이 열을 봅니다. 화살표 키로 움직이고 Enter로 행을 고정합니다.",
      pooled: "{rows} × {columns}로 줄여 보여 줍니다. 한 칸은 그 안에서 가장 큰 값입니다.",
      blind: "이 모델에는 들여다볼 어텐션이 없습니다.", calculator: "계산기",
      story: "{token}이(가) 쿼리 q로 묻습니다. 키마다 점수로 답하고, 소프트맥스가 점수를 합이 1인 가중치로 바꿉니다. "
        + "컨텍스트는 가중치를 곱한 값들의 합입니다.",
      opaque: "{token}이(가) 쿼리 q로 묻습니다. 이 어텐션이 키에 가중치를 주는 방법은 이 페이지에서 다시 계산할 수 없어 맵의 가중치를 "
        + "보여 줍니다. 컨텍스트는 가중치를 곱한 값들의 합입니다.",
      query: "쿼리 q", key: "키 k", value: "값 v", values: "값", product: "가중치 × v", context: "컨텍스트 = 합", mask: "마스크", masked: "가려짐",
      weight: "가중치", bias: "+ 거리", token: "보는 토큰", scale: "÷ √{size}", all: "{count}개 모두 보기",
      strongest: "{total}개 가운데 가중치가 가장 큰 {count}개입니다.", absent: "이 파일에는 이 맵의 벡터가 없습니다.",
      first: "헤드 1의 계산입니다. 헤드의 평균에는 쿼리가 없습니다.", waiting: "잠시만요 …", failed: "실패했습니다: {reason}",
      language: "언어", theme: "밝게 또는 어둡게", score: "점수 {score}", flags: "주의",
    },
  };
  let language = "en";

  /** A word of the current language, with {names} filled in. */
  const say = (name, values = {}) =>
    (words[language][name] ?? words.en[name] ?? name).replace(/\{(\w+)\}/g, (whole, key) => values[key] ?? whole);

  /** What a task says: of its words by language, those of the current one, else the English ones. */
  const said = (texts) => texts[language] ?? texts.en ?? "";

  /** Change the language of everything that is said from now on. */
  function speak(name) {
    language = words[name] ? name : "en";
    document.documentElement.lang = language;
  }

  // --- small tools ---------------------------------------------------------------------------------------------------

  /** An element with attributes, listeners ("onclick") and children; text is only ever text. */
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value != null) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child != null));
    return element;
  }

  const clamp = (number, low, high) => Math.min(Math.max(number, low), high);
  const fixed = (number, digits = 2) => number.toFixed(digits).replace(/^-(0\.?0*$)?/, (_, zero) => zero ?? "−");
  const percent = (share, digits = share < 0.1 ? 1 : 0) => `${(100 * share).toFixed(digits)} %`;
  /** How strongly a weight is painted: the root, so that small weights stay visible. */
  const strength = (weight) => Math.sqrt(weight);
  const label = (token) => token.text.trim() || "·";
  const short = (token) => Array.from(label(token)).map((one, at) => (at < 13 ? one : at > 13 ? "" : "…")).join("");
  /** A text that is written from right to left keeps to itself inside another. */
  const apart = (text) => (/[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/.test(text) ? `\u2068${text}\u2069` : text);
  const quoted = (token) => `‘${apart(label(token))}’`;
  const range = (count) => Array.from({ length: count }, (_, index) => index);
  const floats = (text) => new Float32Array(bytes(text).buffer);

  /** What base64 stands for; a plain loop, for it may be long. */
  function bytes(text) {
    const characters = atob(text), found = new Uint8Array(characters.length);
    for (let index = 0; index < found.length; index++) found[index] = characters.charCodeAt(index);
    return found;
  }

  /** What the browser remembers for us, where it may. */
  const memory = {
    read(name) { try { return localStorage.getItem(`regard.${name}`); } catch { return null; } },
    write(name, value) { try { localStorage.setItem(`regard.${name}`, value); } catch { /* then it forgets */ } },
  };

  /** The state that a link carries, after its #. */
  const link = {
    read: () => Object.fromEntries(new URLSearchParams(location.hash.slice(1))),
    write(values) {
      const kept = Object.entries(values).filter(([, value]) => value != null && value !== "" && value !== false);
      history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
    },
  };

  /** Tell a screen reader. */
  function announce(text) {
    let region = document.getElementById("spoken");
    if (!region) document.body.append((region = make("p", { id: "spoken", class: "unseen", role: "status" })));
    region.textContent = text;
  }

  /** One tab stop for many elements: arrow keys, Home and End move among them; up and down by `stride`. */
  function rove(container, selector, stride = 1) {
    container.addEventListener("keydown", (event) => {
      const turn = getComputedStyle(container).direction === "rtl" ? -1 : 1;
      const steps = { ArrowRight: turn, ArrowLeft: -turn, ArrowDown: stride, ArrowUp: -stride, Home: -1e9, End: 1e9 };
      const all = [...container.querySelectorAll(selector)], at = all.indexOf(document.activeElement);
      if (at < 0 || !(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const next = all[clamp(at + steps[event.key], 0, all.length - 1)];
      for (const element of all) element.tabIndex = element === next ? 0 : -1;
      next.focus();
    });
  }

  /** Hand a file to the person. */
  function save(blob, name) {
    const address = URL.createObjectURL(blob);
    make("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  // --- numbers -------------------------------------------------------------------------------------------------------

  const decoded = new WeakMap();
  const stored = (entry) => entry.pooled ?? entry.shape.slice(1);

  /** The weights of one head, or the mean of all, row-major in the stored shape. */
  function weightsOf(entry, head) {
    if (!decoded.has(entry)) decoded.set(entry, {});
    const cache = decoded.get(entry);
    return (cache[head] ??= head === "mean" ? meanOf(entry) : headOf(entry, head));
  }

  const headOf = ({ packed, heads }, head) =>
    packed ? new Float32Array(bytes(packed[head])).map((byte) => byte / 255) : new Float32Array(heads[head].flat());

  function meanOf(entry) {
    const [first, ...others] = range(entry.shape[0]).map((head) => weightsOf(entry, head)), mean = first.slice();
    for (const head of others) head.forEach((weight, index) => { mean[index] += weight; });
    return mean.map((sum) => sum / entry.shape[0]);
  }

  /** The weight in one cell, by its true row and column. */
  function cellOf(entry, head, row, column) {
    const [, rows, columns] = entry.shape, [high, wide] = stored(entry);
    return weightsOf(entry, head)[Math.floor((row * high) / rows) * wide + Math.floor((column * wide) / columns)];
  }

  /** At most `most` rows and columns: each cell the largest of those it stands for. */
  function shrink(values, rows, columns, most) {
    const high = Math.min(rows, most), wide = Math.min(columns, most);
    if (high === rows && wide === columns) return [values, rows, columns];
    const small = new Float32Array(high * wide);
    for (let row = 0; row < rows; row++) {
      const base = Math.floor((row * high) / rows) * wide;
      for (let column = 0; column < columns; column++) {
        const index = base + Math.floor((column * wide) / columns);
        small[index] = Math.max(small[index], values[row * columns + column]);
      }
    }
    return [small, high, wide];
  }

  /** Weights as a picture of one pixel a cell, in one colour whose opacity is the weight. */
  function picture(canvas, values, rows, columns, colour) {
    const [red, green, blue] = colour.match(/[\d.]+/g).map(Number);
    canvas.width = columns;
    canvas.height = rows;
    const image = new ImageData(columns, rows), pixels = new Uint32Array(image.data.buffer);
    const base = (blue << 16) | (green << 8) | red;
    values.forEach((weight, index) => { pixels[index] = base | (Math.round(255 * strength(weight)) << 24); });
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

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
      step.hidden = (causal && step.column > row) || Boolean(hidden?.includes(step.column));
      step.weight = 0;
    }
    const seen = steps.filter((step) => !step.hidden);
    normalize(seen.map((step) => step.score)).forEach((weight, index) => { seen[index].weight = weight; });
    const same = (step) => Math.abs(step.weight - cellOf(entry, head, row, step.column)) <= 1 / 255;  // a byte each
    return Boolean(entry.pooled) || steps.every(same);
  }

  // --- parts ---------------------------------------------------------------------------------------------------------

  const LONG = 120;

  /** The text that the tokens of a list are parts of: the source, or the answer, or both as one text where no list is
      the source's alone; none if they are only names. */
  function textOf({ text: { source, target }, tokens }, list) {
    if (list === "key") return source;
    if (!tokens[list].some(({ start, end }) => end > start)) return "";
    return tokens.key.length ? target : source + target;
  }

  /** The tokens as a person reads them: a line for each list that the form names, as for the source and the output. */
  class Lines {
    constructor(view) {
      this.view = view;
      this.tokens = {};
      const { tree } = view;
      this.prompt = tree.tokens.key.length ? -1 : Array.from(tree.text.source).length;
      this.element = make("div", { class: "lines" });
      for (const { axis: list, title } of tree.form.lines.filter(({ axis }) => tree.tokens[axis].length)) {
        const line = this.line(list, textOf(tree, list));
        this.element.append(make("h3", { "data-of": list }, said(title)), line);
        rove(line, ".token");
      }
      this.element.addEventListener("mouseover", (event) => this.enter(event));
      this.element.addEventListener("focusin", (event) => this.enter(event));
      this.element.addEventListener("mouseleave", () => view.rest());
      this.element.addEventListener("click", (event) => this.keep(event));
      this.element.addEventListener("keydown", (event) => ["Enter", " "].includes(event.key) && this.keep(event));
    }

    /** One line: the text itself where tokens cover it, small words for the special ones. */
    line(list, text) {
      const characters = Array.from(text), tokens = this.view.tree.tokens[list];
      const line = make("p", { class: tokens.length > LONG ? "line long" : "line", dir: "auto", "data-of": list });
      let at = 0;
      this.tokens[list] = [];
      const asRead = range(tokens.length).sort((a, b) => tokens[a].start - tokens[b].start || a - b);
      for (const index of asRead) {  // a list may have the latest first
        const token = tokens[index], covered = token.end > token.start && token.start >= at;
        const shown = covered ? characters.slice(token.start, token.end).join("") : token.text;
        const gap = characters.slice(at, token.start).join("") + (covered ? shown.match(/^\s*/)[0] : "");
        at = Math.max(at, token.end);
        const element = this.token(list, index, shown.trim() || "·", text !== "" && (!covered || !shown.trim()));
        const between = text ? gap : " ";
        line.append(element.classList.contains("prompt") ? make("span", { class: "prompt" }, between) : between, element);
        this.tokens[list][index] = element;
      }
      return line;
    }

    /** Mark the tokens of the source inside [start, end), or none. */
    mark(place) {
      this.tokens.key?.forEach((element, index) => {
        const { start, end } = this.view.tree.tokens.key[index];
        element.classList.toggle("found", Boolean(place) && start < place[1] && end > place[0]);
      });
    }

    token(list, index, shown, special) {
      const element = make("span", {
        class: special ? "token special" : "token", role: "button", tabindex: index ? -1 : 0,
        "data-list": list, "data-index": index,
      }, shown);
      const { tree } = this.view;
      if (tree.tokens[list][index].end <= this.prompt) element.classList.add("prompt");
      const written = list === "query" && tree.form.answer === "line";
      const logprob = written ? tree.scores?.logprobs?.[index - unscored(tree)] : null;
      if (logprob == null) return element;
      element.style.setProperty("--sure", Math.exp(logprob));
      element.dataset.percent = percent(Math.exp(logprob), 1);
      element.setAttribute("aria-label", say("probability", { token: shown, percent: element.dataset.percent }));
      return element;
    }

    enter(event) {
      const token = event.target.closest(".token");
      if (token) this.view.point(token.dataset.list, Number(token.dataset.index), event.type === "focusin");
    }

    keep(event) {
      const token = event.target.closest(".token");
      if (!token) return;
      event.preventDefault();
      if (token.dataset.list === this.view.entry?.rows) this.view.choose({ row: Number(token.dataset.index) });
    }

    /** Light up a list of tokens by weight, and frame the one that is asked about. */
    paint(list, index, other, weights) {
      for (const [name, elements] of Object.entries(this.tokens)) {
        elements.forEach((element, i) => {
          element.style.setProperty("--weight", name === other ? strength(weights[i]).toFixed(3) : 0);
          element.classList.toggle("asked", name === list && i === index);
        });
      }
      const strongest = this.tokens[other]?.[weights.indexOf(Math.max(...weights))];
      if (other !== list && strongest) this.reveal(strongest);
    }

    /** Scroll a long line so that a token of it can be seen. */
    reveal(token) {
      const line = token.parentElement;
      if (line.scrollHeight > line.clientHeight + 4) line.scrollTop = token.offsetTop - line.clientHeight / 2;
    }

    show(lists) {
      for (const element of this.element.querySelectorAll("[data-of=input]")) element.hidden = !lists.includes("input");
    }
  }

  /** The matrix: one picture per map, and a layer above it for the cross hair. */
  class Matrix {
    constructor(view) {
      this.view = view;
      this.base = make("canvas");
      this.above = make("canvas");
      this.tip = make("p", { class: "tip", hidden: true });
      const name = `${say("matrix")}. ${say("keys")}`;
      this.stage = make("div", { class: "stage", tabindex: 0, role: "application", "aria-label": name },
        this.base, this.above, this.tip);
      this.note = make("p", { class: "note" });
      this.arcs = make("div", { class: "arcs" });
      const swatches = [0.01, 0.1, 0.25, 0.5, 1].map((weight) => {
        const swatch = make("span", { class: "swatch" });
        swatch.style.setProperty("--weight", strength(weight));
        return make("span", {}, swatch, percent(weight, 0));
      });
      this.element = make("section", { class: "matrix", "aria-label": say("matrix") }, make("h2", {}, say("matrix")),
        this.arcs, this.stage, make("p", { class: "legend" }, ...swatches), this.note);
      this.stage.addEventListener("pointermove", (event) => this.hover(event));
      this.stage.addEventListener("pointerdown", (event) => this.hover(event));
      this.stage.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && view.rest());
      this.stage.addEventListener("click", (event) => {
        this.hover(event);
        if (this.row != null) view.choose({ row: this.row });
      });
      this.stage.addEventListener("keydown", (event) => this.move(event));
    }

    /** The colours of the theme, as numbers. */
    mix() {
      this.ink = Object.fromEntries(["accent", "line", "quiet", "text", "mark", "paper"].map((name) => {
        this.stage.style.color = `var(--${name})`;
        return [name, getComputedStyle(this.stage).color];
      }));
    }

    /** Where things are, in CSS pixels, for the width there is. */
    measure(context) {
      const { entry, tree } = this.view, [, rows, columns] = entry.shape;
      const widest = (labels) => Math.max(...labels.map((text) => context.measureText(text).width));
      const names = { rows: tree.tokens[entry.rows].map(short), columns: tree.tokens[entry.columns].map(short) };
      const room = this.stage.clientWidth, left = Math.ceil(widest(names.rows)) + 12, wide = widest(names.columns);
      const fit = (right) => Math.max(0.5, Math.min((room - left - right) / columns, 40, 640 / rows));
      const slanted = wide > fit(0) - 6, right = slanted ? wide * 0.6 : 0, cell = fit(right);
      const top = slanted ? Math.ceil(wide * 0.8) + 14 : 22;
      const width = Math.ceil(left + cell * columns + right + 1), height = Math.ceil(top + cell * rows + 1);
      return { rows, columns, names, left, top, cell, slanted, width, height };
    }

    /** A canvas ready to draw on in CSS pixels. */
    prepare(canvas, width, height) {
      const ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.font = `13px ${getComputedStyle(this.stage).fontFamily}`;
      context.textBaseline = "middle";
      return context;
    }

    draw() {
      const { entry, state } = this.view;
      this.mix();
      const place = (this.place = this.measure(this.prepare(this.base, 1, 1)));
      const context = this.prepare(this.base, place.width, place.height);
      this.prepare(this.above, place.width, place.height);
      this.stage.style.height = `${place.height}px`;
      context.imageSmoothingEnabled = false;
      const image = picture(make("canvas"), weightsOf(entry, state.head), ...stored(entry), this.ink.accent);
      const { left, top, cell, rows, columns } = place;
      context.strokeStyle = this.ink.line;
      context.strokeRect(left - 0.5, top - 0.5, cell * columns + 1, cell * rows + 1);
      context.drawImage(image, left, top, cell * columns, cell * rows);
      const every = Math.ceil(14 / cell), spaced = (index) => index % every === 0;
      context.fillStyle = this.ink.quiet;
      range(rows).filter(spaced).forEach((row) => this.write(context, row, null));
      range(columns).filter(spaced).forEach((column) => this.write(context, null, column));
      if (state.hard) this.mark(context);
      const [high, wide] = stored(entry);
      this.note.textContent = entry.pooled ? say("pooled", { rows: high, columns: wide }) : say("keys");
    }

    /** The label of a row or a column. */
    write(context, row, column) {
      const { left, top, cell, slanted, names } = this.place;
      context.save();
      if (row != null) {
        context.textAlign = "right";
        context.fillText(names.rows[row], left - 7, top + (row + 0.5) * cell + 1);
      } else {
        context.translate(left + (column + 0.5) * cell, top - 7);
        if (slanted) context.rotate(-0.9);
        context.textAlign = slanted ? "left" : "center";
        context.fillText(names.columns[column], slanted ? 2 : 0, slanted ? -2 : -4);
      }
      context.restore();
    }

    /** Hard alignment: a dot on the strongest cell of each row. */
    mark(context) {
      const { left, top, cell, rows, columns } = this.place, { entry, state } = this.view;
      context.fillStyle = this.ink.mark;
      for (let row = 0; row < rows; row++) {
        const best = range(columns).reduce((most, column) =>
          cellOf(entry, state.head, row, column) > cellOf(entry, state.head, row, most) ? column : most, 0);
        context.beginPath();
        context.arc(left + (best + 0.5) * cell, top + (row + 0.5) * cell, clamp(cell * 0.16, 1, 5), 0, 7);
        context.fill();
      }
    }

    /** The cross hair on a row, a column, or a cell. */
    point(row, column) {
      const { left, top, cell, rows, columns, width, height } = this.place, context = this.above.getContext("2d");
      Object.assign(this, { row, column });
      context.clearRect(0, 0, width, height);
      context.fillStyle = this.ink.text;
      context.strokeStyle = cell < 6 ? this.ink.mark : this.ink.text;
      context.lineWidth = cell < 6 ? 0.5 : 1;
      if (row != null) context.strokeRect(left - 0.5, top + row * cell - 0.5, cell * columns + 1, cell + 1);
      if (column != null) context.strokeRect(left + column * cell - 0.5, top - 0.5, cell + 1, cell * rows + 1);
      if (cell >= 14 && row != null) this.write(context, row, null);
      if (cell >= 14 && column != null) this.write(context, null, column);
      const both = row != null && column != null;
      this.tip.hidden = !both;
      if (!both) return;
      context.strokeStyle = this.ink.mark;
      context.lineWidth = 2;
      context.strokeRect(left + column * cell, top + row * cell, cell, cell);
      const { query, key, weight } = this.view.cell(row, column);
      this.tip.textContent = `${apart(label(query))} → ${apart(label(key))}  ${percent(weight)}`;
      const most = Math.max(0, this.stage.clientWidth - this.tip.offsetWidth);
      this.tip.style.left = `${Math.min(left + (column + 1) * cell + 8, most)}px`;
      this.tip.style.top = `${top + (row + 1) * cell + 8}px`;
    }

    hover(event) {
      const { left, top, cell, rows, columns } = this.place, box = this.base.getBoundingClientRect();
      const row = Math.floor((event.clientY - box.top - top) / cell);
      const column = Math.floor((event.clientX - box.left - left) / cell);
      if (row < 0 || column < 0 || row >= rows || column >= columns) return this.view.rest();
      if (row !== this.row || column !== this.column) this.view.pointCell(row, column);
    }

    move(event) {
      const { rows, columns } = this.place;
      const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (event.key === "Enter" && this.row != null) this.view.choose({ row: this.row });
      if (!by) return;
      event.preventDefault();
      const start = this.column == null ? [this.row ?? 0, 0] : [this.row + by[0], this.column + by[1]];
      this.view.pointCell(clamp(start[0], 0, rows - 1), clamp(start[1], 0, columns - 1), true);
    }

    /** The matrix with its labels and its name, as a PNG. */
    download() {
      const ratio = window.devicePixelRatio || 1, edge = 16 * ratio, title = 28 * ratio;
      const font = `${13 * ratio}px ${getComputedStyle(this.stage).fontFamily}`, canvas = make("canvas");
      const context = canvas.getContext("2d");
      context.font = font;
      canvas.width = Math.max(this.base.width, Math.ceil(context.measureText(this.view.title()).width)) + 2 * edge;
      canvas.height = this.base.height + 2 * edge + title;
      context.fillStyle = this.ink.paper;
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.fillStyle = this.ink.text;
      context.font = font;
      context.fillText(this.view.title(), edge, edge + 12 * ratio);
      context.drawImage(this.base, edge, edge + title);
      canvas.toBlob((blob) => save(blob, "regard.png"));
    }
  }

  /** Every head of every layer, small. */
  class Heads {
    constructor(view) {
      this.view = view;
      this.buttons = [];
      this.element = make("section", { class: "heads", "aria-label": say("heads") }, make("h2", {}, say("heads")));
      const { maps } = view.tree, sides = ({ rows, columns }) => `${rows} ${columns}`;
      const groups = [...new Set(maps.map(sides))].map((both) => maps.filter((entry) => sides(entry) === both));
      for (const members of groups.sort(([a], [b]) => isAcross(b) - isAcross(a))) {
        const called = view.groupOf(members[0]), title = make("h3", {}, called);
        const group = make("div", { role: "group", "aria-label": called }, title);
        for (const entry of members) group.append(this.layer(entry));
        const first = group.querySelector("button");
        first.tabIndex = 0;
        rove(group, "button", members[0].shape[0]);
        this.element.append(group);
      }
      this.element.append(make("p", { class: "note" }, say("under")));
    }

    layer(entry) {
      const thumbs = range(entry.shape[0]).map((head) => this.thumb(entry, head));
      return make("div", { class: "layer" }, make("span", { class: "name" }, this.view.layerOf(entry)),
        make("div", { class: "thumbs" }, ...thumbs));
    }

    thumb(entry, head) {
      const entropy = fixed(entry.entropy?.[head] ?? 0), far = entry.distance?.[head];
      const distance = far == null ? null : fixed(far, 1);
      const canvas = make("canvas", { "aria-hidden": "true" });
      const button = make("button", {
        type: "button", tabindex: -1, onclick: () => this.view.choose({ map: entry.name, head }),
        "aria-label": say("thumb", {
          map: this.view.titleOf(entry), head: head + 1, entropy,
          distance: distance ? say("distance", { distance }) : "",
        }),
      }, canvas, make("small", {}, say("bits", { entropy })), distance && make("small", {}, say("far", { distance })));
      this.buttons.push({ entry, head, button, canvas });
      return button;
    }

    draw(colour) {
      for (const { entry, head, canvas } of this.buttons)
        picture(canvas, ...shrink(weightsOf(entry, head), ...stored(entry), 48), colour);
    }

    show() {
      const { entry, state } = this.view;
      for (const { entry: other, head, button } of this.buttons)
        button.setAttribute("aria-pressed", other === entry && (state.head === "mean" || state.head === head));
    }
  }

  /** The real numbers of one query and head (B8). */
  class Calculator {
    constructor(view) {
      this.view = view;
      this.most = 16;
      this.body = make("div");
      const summary = make("summary", {}, make("h2", {}, say("calculator")));
      this.element = make("details", { class: "calculator" }, summary, this.body);
      this.element.open = Boolean(view.state.calculator);
      this.element.addEventListener("toggle", () => view.choose({ calculator: this.element.open }));
    }

    draw() {
      const { entry, state, failure, tree, options } = this.view, note = (text) => make("p", { class: "note" }, text);
      if (!this.element.open) return;
      if (failure) return this.body.replaceChildren(note(say("failed", { reason: failure })));
      if (!entry.vectors) return this.body.replaceChildren(note(say(options.fetchMap ? "waiting" : "absent")));
      const mean = state.head === "mean", token = quoted(tree.tokens[entry.rows][state.row]);
      const found = calculate(entry, mean ? 0 : state.head, state.row);
      this.body.replaceChildren(...[
        make("p", {}, say(found.known ? "story" : "opaque", { token })), mean && entry.shape[0] > 1 && note(say("first")),
        make("p", { class: "formula" }, this.formula(entry.vectors)),
        make("div", { class: "asking" }, make("b", {}, `${say("query")} ${token}`), bars(found.query)),
        make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": say("calculator") },
          this.table(entry, found)),
        this.rest(found.steps.length),
      ].filter(Boolean));
    }

    formula(given) {
      const score = SCORES[given.score]?.formula ?? given.score, bias = given.slopes ? " + m |i − j|" : "";
      return `${given.normalizer}( ${score}${bias} ) · ${say("values")}      d = ${given.size}`;
    }

    table(entry, { steps, context, known }) {
      const { score, slopes, size, causal, hidden } = entry.vectors, tokens = this.view.tree.tokens[entry.columns];
      const [high, wide] = ["key", "value"].map((name) => largest(steps.map((step) => step[name])));
      const columns = [
        ["token", (step) => label(tokens[step.column])], ["key", (step) => bars(step.key, high)],
        known && [score === "additive" ? SCORES.additive.formula : SCORES.dot.formula, (step) => fixed(step.raw, 3)],
        known && score === "scaled dot" && [say("scale", { size }), (step) => fixed(step.scaled, 3)],
        known && slopes && ["bias", (step) => fixed(step.score, 3)],
        known && (causal || hidden?.length > 0) && ["mask", (step) => (step.hidden ? say("masked") : "✓")],
        ["weight", (step) => gauge(step.weight)], ["value", (step) => bars(step.value, wide)],
        ["product", (step) => bars(step.product, wide)],
      ].filter(Boolean);
      const order = [...steps].sort((a, b) => b.weight - a.weight), row = (...cells) => make("tr", {}, ...cells);
      const strongest = order.slice(0, this.most).sort((a, b) => a.column - b.column);
      const rows = strongest.map((step) => make("tr", { class: step.hidden && "hidden", "data-weight": step.weight },
        ...columns.map(([, show], index) => make(index ? "td" : "th", { scope: index ? null : "row" }, show(step)))));
      const sum = make("th", { scope: "row", colspan: columns.length - 1 }, say("context"));
      return make("table", {},
        make("thead", {}, row(...columns.map(([name]) => make("th", { scope: "col" }, say(name))))),
        make("tbody", {}, ...rows), make("tfoot", {}, row(sum, make("td", {}, bars(context, wide)))));
    }

    rest(total) {
      if (total <= this.most) return null;
      const more = () => { this.most = Infinity; this.draw(); };
      return make("p", { class: "note" }, say("strongest", { count: this.most, total }), " ",
        make("button", { type: "button", onclick: more }, say("all", { count: total })));
    }
  }

  /** An element of a drawing. */
  function drawn(tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  /** Soft parents as arcs over the words: the darker, the likelier; a line from above is the root. */
  function drawArcs(entry, head, tokens) {
    const [, words] = entry.shape, step = 44, place = (word) => step * (word + 0.5), marks = [];
    const rise = (word, parent) => 14 * Math.abs(word - parent) ** 0.7;
    const base = 12 + rise(0, words - 1);
    for (const word of range(words)) for (const parent of range(words)) {
      const weight = cellOf(entry, head, word, parent);
      if (weight < 0.05) continue;
      const x = place(word), from = place(parent) + (word > parent ? 5 : -5), top = base - 1.33 * rise(word, parent);
      const d = word === parent ? `M${x} ${base}V${base - 26}`
        : `M${from} ${base}C${from} ${top} ${x} ${top} ${x} ${base}`;
      const title = drawn("title", {}, `${label(tokens[word])} ← ${word === parent ? "·" : label(tokens[parent])} ${percent(weight)}`);
      marks.push(drawn("path", { d, opacity: weight, "stroke-width": 0.6 + 1.6 * weight }, title),
        drawn("circle", { cx: x, cy: base, r: 2.2, opacity: weight }));
    }
    const names = tokens.map((token, word) => drawn("text", { x: place(word), y: base + 16 }, short(token)));
    const width = step * words, height = base + 24;
    return drawn("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": say("arcs") },
      ...marks, ...names);
  }

  /** The largest number in some vectors, whatever its sign. */
  const largest = (vectors) => Math.max(1e-9, ...vectors.map((vector) => Math.max(...vector.map(Math.abs))));

  /** A vector: small bars against the largest, its first numbers, all of them when opened. */
  function bars(vector, most = largest([vector])) {
    const numbers = Array.from(vector), step = 96 / numbers.length;
    const bar = (number, index) => `M${index * step} 10v${(-9.5 * number) / most}h${step * 0.8}V10z`;
    const path = drawn("path", { d: numbers.map(bar).join("") });
    const drawing = drawn("svg", { viewBox: "0 0 96 20", width: 96, height: 20, "aria-hidden": "true" }, path);
    const start = numbers.slice(0, 2).map((number) => fixed(number)).join("  ");
    return make("details", { class: "vector" },
      make("summary", {}, drawing, make("span", {}, `${start} …`)),
      make("p", {}, numbers.map((number) => fixed(number, 3)).join("  ")));
  }

  /** A share of one, as a bar and a number. */
  function gauge(share) {
    const bar = make("span", { class: "gauge" }, percent(share, 1));
    bar.style.setProperty("--share", share);
    return bar;
  }

  /** Whether a map goes from one list of tokens to another. */
  const isAcross = (entry) => entry.kind !== "self" && entry.rows !== entry.columns && entry.columns !== "input";
  /** The colour of a label, the same everywhere: as an angle. */
  function hue(label) {
    return Array.from(label).reduce((sum, letter) => (sum * 31 + letter.codePointAt(0) * 47) % 360, 7);
  }

  /** How many of the output's tokens have no probability: those of a prompt. */
  const unscored = (tree) => tree.tokens.query.length - (tree.scores?.logprobs?.length ?? 0);

  // --- the whole -----------------------------------------------------------------------------------------------------

  class View {
    constructor(container, tree, options) {
      Object.assign(this, { container, tree, options, gone: new AbortController() });
      container.regard?.gone.abort();
      container.regard = this;
      this.state = this.checked(options.state ?? {});
      this.build();
      announce(`${say("answer")}: ${tree.text.target}`);
    }

    /** The map that is chosen. */
    get entry() { return this.tree.maps.find((entry) => entry.name === this.state.map); }

    /** A state that fits this tree, whatever a link said. */
    checked({ map, head, row, hard, calculator }) {
      const { maps } = this.tree;
      const entry = maps.find((other) => other.name === map) ?? maps.filter(isAcross).at(-1) ?? maps.at(-1);
      const [heads, rows] = entry?.shape ?? [0, 1];
      const one = Number.parseInt(head, 10), line = Number.parseInt(row ?? this.first(entry), 10) || 0;
      return { map: entry?.name, head: one >= 0 && one < heads ? one : "mean", row: clamp(line, 0, rows - 1),
        hard: Boolean(hard), calculator: Boolean(calculator) };
    }

    /** The row that is shown first: the likeliest of the bars; the first token that was written. */
    first(entry) {
      const { form, scores } = this.tree;
      if (entry?.rows !== "query") return 0;
      if (form.answers === "bars") return scores.logprobs.indexOf(Math.max(...scores.logprobs));
      return form.answer === "line" ? unscored(this.tree) : 0;
    }

    /** What the form says of a map and those with the same rows and columns. */
    group({ rows, columns }) {
      return this.tree.form.groups.find((group) => group.rows === rows && group.columns === columns);
    }

    /** What a map and those with the same rows and columns are called. */
    groupOf(entry) {
      const group = this.group(entry);
      return group ? said(group.title) : say(`${entry.kind} maps`);
    }

    /** The layer of a map, if it is told apart by it. */
    layerOf(entry) {
      return this.group(entry)?.layered === false ? "" : say("layer", { layer: (entry.layer ?? 0) + 1 });
    }

    titleOf(entry) { return [this.groupOf(entry), this.layerOf(entry)].filter(Boolean).join(" · "); }

    build() {
      this.lines = new Lines(this);
      this.looks = make("section", { class: "looks" });
      const answer = make("section", { class: "answer", "aria-label": say("answer") },
        this.tree.form.answer === "none" ? null : make("h2", {}, say("answer")),
        this.flags(), this.given(), this.lines.element, make("div", { class: "beside" }, this.looks, this.others()));
      this.lines.mark(this.tree.answers?.[0]?.place);
      if (!this.tree.maps.length) {
        this.lines.show([]);
        return this.container.replaceChildren(answer, make("p", { class: "note" }, say("blind")));
      }
      this.matrix = new Matrix(this);
      this.heads = new Heads(this);
      this.calculator = new Calculator(this);
      this.tools = make("div", { class: "tools" });
      const beside = make("div", { class: "maps" }, this.matrix.element, this.heads.element);
      this.container.replaceChildren(answer, this.tools, beside, this.calculator.element);
      const { signal } = this.gone;
      const observer = new ResizeObserver(() => this.matrix.stage.clientWidth !== this.width && this.draw());
      observer.observe(this.container);
      signal.addEventListener("abort", () => observer.disconnect());
      const redraw = () => { this.draw(); this.heads.draw(this.matrix.ink.accent); };
      document.addEventListener("themechange", redraw, { signal });
      redraw();
      this.complete();
    }

    flags() {
      const flags = (this.tree.flags ?? []).map((flag) => make("li", { lang: "en" }, flag));
      return flags.length ? make("ul", { class: "flags", "aria-label": say("flags") }, ...flags) : null;
    }

    /** An answer in large letters; one that is a line has no need of them. */
    given() {
      const { form, text } = this.tree;
      if (form.answer === "spans") return this.tagged();
      if (form.answer !== "large") return null;
      const nothing = form.answers === "bars" ? say("no answer") : "∅";
      return (this.large = make("p", { class: "given", dir: "auto" }, text.target || nothing));
    }

    /** The source with its tags: every span, or every word where tags mark none, in the colour of its label. */
    tagged() {
      const { text, answers } = this.tree, characters = Array.from(text.source), { words = [], spans = [] } = answers[0];
      const parts = spans.length ? spans : words.map(({ tag, start, end }) => ({ label: tag, start, end }));
      const element = make("p", { class: "given tagged", dir: "auto" });
      let at = 0;
      for (const { label, start, end } of parts) {
        const inside = words.filter((word) => word.start >= start && word.end <= end);
        const sure = Math.min(...inside.map(({ probability }) => probability));
        const title = say("probability", { token: label, percent: percent(sure, 1) });
        const mark = make("mark", { title, "aria-label": title }, characters.slice(start, end).join(""),
          make("small", {}, `${label} ${percent(sure, 0)}`));
        mark.style.setProperty("--hue", hue(label));
        mark.style.setProperty("--sure", sure);
        element.append(characters.slice(at, start).join(""), mark);
        at = end;
      }
      element.append(characters.slice(at).join(""));
      return element;
    }

    /** The other answers: bars; or a list, best first, where those that can be looked at are buttons. */
    others() {
      const { form, answers } = this.tree;
      if (form.answers === "bars") return this.classes();
      if (form.answers !== "list" || !answers?.length) return null;
      const items = answers.map((answer) => this.other(answer));
      return make("section", { class: "others" }, make("h3", {}, say("others")), make("ol", {}, ...items));
    }

    /** An answer that has its place in the source is shown there, another is looked at. */
    other({ text, score, probability, place }) {
      const { onanswer } = this.options, shown = make("span", { dir: "auto" }, text || "∅");
      const sure = probability != null;
      const amount = sure ? gauge(probability) : make("small", { title: say("score", { score }) }, fixed(score));
      const onclick = (event) => (place ? this.find(event.currentTarget, text, place) : onanswer(text));
      const button = (place || onanswer) && make("button", {
        type: "button", class: "plain", onclick, "aria-label": say("look at", { text: text || "∅" }) }, shown);
      return make("li", { "aria-current": text === this.tree.text.target ? "true" : null }, button || shown, amount);
    }

    /** Show where another answer is. */
    find(button, text, place) {
      if (this.large) this.large.textContent = text;
      this.lines.mark(place);
      for (const item of button.closest("ol").children) item.removeAttribute("aria-current");
      button.closest("li").setAttribute("aria-current", "true");
    }

    /** Every class and how likely it is, likeliest first; where classes look at the text, one shows what it saw. */
    classes() {
      const { tokens, scores, maps } = this.tree;
      const chances = tokens.query.map((_, row) => Math.exp(scores.logprobs[row] ?? -Infinity));
      const looks = maps.find((entry) => entry.rows === "query");
      const order = range(chances.length).sort((a, b) => chances[b] - chances[a]);
      const item = (row) => {
        const name = make("span", { dir: "auto" }, tokens.query[row].text);
        const choose = () => this.choose({ map: looks.name, row });
        const button = looks && make("button", {
          type: "button", class: "plain", "data-row": row, onclick: choose, onmouseenter: () => this.point("query", row),
          onmouseleave: () => this.rest(), onfocus: () => this.point("query", row),
          "aria-label": say("look at", { text: tokens.query[row].text }) }, name);
        return make("li", { "data-row": row }, button || name, gauge(chances[row]));
      };
      const list = make("ol", {}, ...order.map(item));
      rove(list, "button");
      return (this.bars = make("section", { class: "others bars" }, make("h3", {}, say("classes")), list));
    }

    /** The controls: map, head, row, hard alignment, downloads. */
    controls() {
      const { entry, state, tree } = this;
      const heads = [["mean", say("mean")], ...range(entry.shape[0]).map((head) => [head, String(head + 1)])];
      const rows = tree.tokens[entry.rows].map((token, row) => [row, `${row + 1}  ${label(token)}`]);
      const onchange = (event) => this.choose({ hard: event.target.checked });
      const hard = make("input", { type: "checkbox", name: "hard", checked: state.hard, onchange });
      const json = () => save(new Blob([JSON.stringify(tree)], { type: "application/json" }), "regard.json");
      return [
        this.select("map", tree.maps.map((other) => [other.name, this.titleOf(other)])), this.select("head", heads),
        this.select("row", rows), make("label", { class: "check" }, hard, say("hard")),
        make("span", { class: "saves" }, this.saving("PNG", () => this.matrix.download()), this.saving("JSON", json)),
      ];
    }

    select(name, pairs) {
      const chosen = String(this.state[name]), onchange = (event) => this.choose({ [name]: event.target.value });
      const options = pairs.map(([value, text]) => make("option", { value, selected: String(value) === chosen }, text));
      return make("label", {}, say(name), make("select", { name, onchange }, ...options));
    }

    saving(format, onclick) {
      const title = say("save", { format });
      return make("button", { type: "button", name: format, title, "aria-label": title, onclick }, `↓ ${format}`);
    }

    /** Change what is shown; the rest follows. */
    choose(changes) {
      const same = Object.entries(changes).every(([name, value]) => this.state[name] === value);
      if (same || this.gone.signal.aborted || !this.tree.maps.length) return;
      this.state = this.checked({ ...this.state, ...changes });
      this.failure = null;
      this.options.onstate?.(this.state);
      this.draw();
      this.complete();
    }

    draw() {
      const focused = this.tools.contains(document.activeElement) && document.activeElement.name;
      this.tools.replaceChildren(...this.controls());
      if (focused) this.tools.querySelector(`[name=${focused}]`)?.focus();
      this.lines.show([this.entry.rows, this.entry.columns]);
      this.matrix.draw();
      const trees = this.entry.kind === "tree" && !this.entry.pooled;
      this.matrix.arcs.replaceChildren(
        ...(trees ? [drawArcs(this.entry, this.state.head, this.tree.tokens[this.entry.columns])] : []));
      this.width = this.matrix.stage.clientWidth;
      this.heads.show();
      for (const item of this.bars?.querySelectorAll("li") ?? [])
        item.setAttribute("aria-current", this.entry.rows === "query" && Number(item.dataset.row) === this.state.row);
      this.calculator.draw();
      this.rest();
    }

    /** Fetch what is missing of the chosen map: its full size, its vectors. */
    async complete() {
      const { entry, options, state } = this, vectors = state.calculator && !entry.vectors;
      if (!options.fetchMap || !(entry.pooled || vectors)) return;
      try {
        const whole = await options.fetchMap(entry.name, state.calculator);
        decoded.delete(entry);
        Object.assign(entry, { pooled: null }, whole);
        if (vectors && !entry.vectors) this.failure = say("absent");
      } catch (error) {
        if (error.name !== "AbortError") this.failure = error.message;
      }
      if (!this.gone.signal.aborted && entry === this.entry) this.draw();
    }

    title() {
      const { entry, state } = this;
      const head = state.head === "mean" ? say("mean") : state.head + 1;
      return `${this.titleOf(entry)} · ${say("head")}: ${head}`;
    }

    /** Nothing is hovered: show the row that was kept. */
    rest() { if (this.entry) this.point(this.entry.rows, this.state.row); }

    /** Somebody asks about one token: light up what it looks at, or who looks at it. */
    point(list, index, spoken = false) {
      const seen = this.asked(list);
      if (!seen) return;
      const { entry, head, turned } = seen, [, rows, columns] = entry.shape;
      const weights = range(turned ? rows : columns)
        .map((at) => (turned ? cellOf(entry, head, at, index) : cellOf(entry, head, index, at)));
      const other = turned ? entry.rows : entry.columns;
      this.lines.paint(list, index, other, weights);
      if (entry === this.entry && entry.pooled && this.options.fetchMap && !this.failure)
        this.looks.replaceChildren(make("h3", {}, say("waiting")));  // until the true weights are here
      else this.list(this.tree.tokens[list][index], this.tree.tokens[other], weights, turned, spoken);
      if (entry === this.entry) this.matrix.point(turned ? null : index, turned ? index : null);
    }

    /** The map that answers for a list of tokens: the chosen one, or else the last one that has that list. */
    asked(list) {
      if (!this.tree.maps.length) return null;
      const has = (entry) => entry.rows === list || entry.columns === list;
      const own = has(this.entry), entry = own ? this.entry : this.tree.maps.filter(has).at(-1);
      return entry && { entry, head: own ? this.state.head : "mean", turned: entry.rows !== list };
    }

    /** Who looks at whom in one cell, and how much. */
    cell(row, column) {
      const { entry, tree, state } = this;
      return { query: tree.tokens[entry.rows][row], key: tree.tokens[entry.columns][column],
        weight: cellOf(entry, state.head, row, column) };
    }

    pointCell(row, column, spoken = false) {
      const { query, key, weight } = this.cell(row, column), names = { query: quoted(query), key: quoted(key) };
      this.point(this.entry.rows, row);
      this.matrix.point(row, column);
      if (spoken) announce(say("cell", { row: row + 1, column: column + 1, ...names, percent: percent(weight) }));
    }

    /** The five strongest, with their numbers. */
    list(token, tokens, weights, turned, spoken) {
      const order = range(weights.length).sort((a, b) => weights[b] - weights[a]);
      const strongest = order.slice(0, 5).filter((index, place) => !place || weights[index] >= 0.0005);
      const title = say(turned ? "seen" : "looks", { token: quoted(token) });
      const item = (index) => make("li", {}, make("bdi", {}, label(tokens[index])), gauge(weights[index]));
      const items = strongest.map(item);
      this.looks.classList.toggle("sentences", this.tree.tokens.key.some(({ text }) => text.length > 24));
      this.looks.replaceChildren(make("h3", {}, title), make("ol", {}, ...items));
      const first = strongest.slice(0, 3).map((index) => `${label(tokens[index])} ${percent(weights[index])}`);
      if (spoken) announce(`${title}: ${first.join(", ")}`);
    }
  }

  /** Switches of language and theme, for the top of a page. */
  function bar(container, onlanguage) {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
    const change = () => document.dispatchEvent(new CustomEvent("themechange"));
    const turn = () => {
      root.dataset.theme = (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
      memory.write("theme", root.dataset.theme);
      change();
    };
    if (memory.read("theme")) root.dataset.theme = memory.read("theme");
    dark.addEventListener("change", change);
    const options = Object.entries({ en: "English", ko: "한국어" })
      .map(([value, text]) => make("option", { value, lang: value, selected: value === language }, text));
    const choose = () => { memory.write("language", select.value); speak(select.value); name(); onlanguage(); };
    const select = make("select", { id: "language", onchange: choose }, ...options);
    const theme = make("button", { type: "button", id: "theme", onclick: turn }, "◐");
    const name = () => {
      select.setAttribute("aria-label", say("language"));
      theme.setAttribute("aria-label", (theme.title = say("theme")));
    };
    name();
    container.append(select, theme);
  }

  /** The language of the link, else the one that was chosen before, else the browser's. */
  const preferred = () => link.read().language ?? memory.read("language") ?? navigator.language.slice(0, 2);

  /** Show something else where a tree was drawn, whose view ends: it draws and asks no more. */
  function replace(container, ...children) {
    container.regard?.gone.abort();
    delete container.regard;
    container.replaceChildren(...children);
  }

  /** Draw a tree into a container. */
  function view(container, tree, options = {}) {
    if (options.language) speak(options.language);
    return new View(container, tree, options);
  }

  /** A file that stands alone brings its tree along. */
  function open() {
    const source = document.getElementById("tree"), container = document.getElementById("view");
    if (!source || !container) return;
    const tree = JSON.parse(source.textContent), top = make("nav", { class: "bar" });
    const header = make("header", { class: "top" }, make("h1", {}, "regard"), top);
    const onstate = (state) => link.write({ ...state, language });
    const draw = () => view(container, tree, { state: container.regard?.state ?? link.read(), onstate });
    speak(preferred());
    bar(top, () => { draw(); onstate(container.regard.state); });
    container.before(header);
    draw();
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", open);
  else open();

  return { view, replace, words, say, said, speak, make, bar, memory, link, preferred, announce, calculate, percent };
})();
