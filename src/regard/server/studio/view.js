/* The viewer: draws what a model looked at, from the tree that regard.look makes. A plain script with one global; the
   studio uses it, and so does the file that stands alone, where it is inlined and finds its tree in #tree. The numbers
   are maps.js's. */
"use strict";

const Regard = (() => {
  const {
    range, kept, forget, stored, tileOf, isPicture, weightsOf, seen, seenTiles, rowOf, cellOf, columnOf, strongest,
    cells, pool, SCORES, calculate,
  } = RegardMaps;

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
      "slots maps": "Tokens look at Linformer’s slots", "gathered maps": "What each of Linformer’s slots gathers",
      tiles: "Tiles of {rows} × {columns} weights, each as dark as its largest one. Click a tile to see its tokens; "
        + "with the keyboard, arrow keys and Enter.",
      tile: "rows {rows} look at columns {columns}: at most {percent}",
      "zoomed in": "Rows {rows} and columns {columns} of {height} × {width}. Escape shows the whole map.",
      "whole map": "Whole map", unseen: "not seen",
      "top cells": "Only the {count} largest weights of each row are here: an empty cell is smaller than those.",
      top: "The {count} largest of {total}; {percent} of the weight is elsewhere.",
      "top mean": "Of each head the {count} largest of {total}; {percent} of the weight is elsewhere.",
      "top column": "Only rows that have it among their {count} largest weights.",
      part: "It may look at {count} of {total}.",
      picture: "There is only a picture of this map here: tiles, no single weights.",
      window: "Tokens {first}–{last} of {total}; the others are left out here.", earlier: "Earlier tokens",
      later: "Later tokens", blind: "This model has no attention to look at.", calculator: "Calculator",
      story: "{token} asks with its query q. Each key answers with a score; softmax turns the scores into weights "
        + "that sum to 1; the context is the sum of the values, each times its weight.",
      opaque: "{token} asks with its query q. This page cannot recompute how this attention weighs the keys: the "
        + "weights are those of the map. The context is the sum of the values, each times its weight.",
      query: "query q", key: "key k", value: "value v", values: "values", product: "weight × v", context: "context = sum",
      mask: "mask", masked: "hidden", weight: "weight", bias: "+ distance", token: "looks at",
      scale: "÷ √{size}", all: "Show all {count}",
      strongest: "The {count} strongest of {total}.", absent: "The vectors of this map are not in this file.",
      first: "Shown for head 1: a mean of heads has no query of its own.", waiting: "One moment …",
      over: "Bright is where {token} looks; the brightest place has {percent}.", "cell of": "cell {name}",
     
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
      "slots maps": "토큰이 보는 린포머 슬롯", "gathered maps": "린포머 슬롯마다 모으는 토큰",
      tiles: "타일 하나는 가중치 {rows} × {columns}개이고, 그 안에서 가장 큰 값만큼 진합니다. 타일을 누르면 그 안의 토큰이 보입니다. "
        + "키보드로는 화살표 키와 Enter를 씁니다.",
      tile: "{rows}행 → {columns}열: 최대 {percent}",
      "zoomed in": "{height} × {width} 가운데 {rows}행, {columns}열입니다. Esc를 누르면 전체 맵이 보입니다.",
      "whole map": "전체 맵", unseen: "볼 수 없음",
      "top cells": "행마다 가장 큰 가중치 {count}개만 있습니다. 빈칸은 그보다 작습니다.",
      top: "{total}개 가운데 가장 큰 {count}개입니다. 가중치의 {percent}는 다른 곳에 있습니다.",
      "top mean": "헤드마다 {total}개 가운데 가장 큰 {count}개입니다. 가중치의 {percent}는 다른 곳에 있습니다.",
      "top column": "이 토큰이 가장 큰 가중치 {count}개에 드는 행만 보여 줍니다.",
      part: "{total}개 가운데 {count}개를 볼 수 있습니다.",
      picture: "이 맵은 타일 그림만 있고 가중치 하나하나는 없습니다.",
      window: "{total}개 가운데 {first}–{last}번째 토큰입니다. 나머지는 여기에 없습니다.", earlier: "앞 토큰", later: "뒤 토큰",
      blind: "이 모델에는 들여다볼 어텐션이 없습니다.", calculator: "계산기",
      story: "{token}이(가) 쿼리 q로 묻습니다. 키마다 점수로 답하고, 소프트맥스가 점수를 합이 1인 가중치로 바꿉니다. "
        + "컨텍스트는 가중치를 곱한 값들의 합입니다.",
      opaque: "{token}이(가) 쿼리 q로 묻습니다. 이 어텐션이 키에 가중치를 주는 방법은 이 페이지에서 다시 계산할 수 없어 맵의 가중치를 "
        + "보여 줍니다. 컨텍스트는 가중치를 곱한 값들의 합입니다.",
      query: "쿼리 q", key: "키 k", value: "값 v", values: "값", product: "가중치 × v", context: "컨텍스트 = 합", mask: "마스크", masked: "가려짐",
      weight: "가중치", bias: "+ 거리", token: "보는 토큰", scale: "÷ √{size}", all: "{count}개 모두 보기",
      strongest: "{total}개 가운데 가중치가 가장 큰 {count}개입니다.", absent: "이 파일에는 이 맵의 벡터가 없습니다.",
      first: "헤드 1의 계산입니다. 헤드의 평균에는 쿼리가 없습니다.", waiting: "잠시만요 …",
      over: "밝은 곳이 {token}(이)가 보는 곳이며, 가장 밝은 곳은 {percent}입니다.", "cell of": "칸 {name}",
      failed: "실패했습니다: {reason}",
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
  const percent = (share, digits = share < 0.1 ? finely(share) : 0) => `${(100 * share).toFixed(digits)} %`;
  /** The digits of a small share: one, or so many that something is left of it. */
  const finely = (share) => (share > 0 && share < 0.0005 ? Math.min(4, Math.ceil(-Math.log10(share)) - 2) : 1);
  /** How strongly a weight is painted: the root, so that small weights stay visible. */
  const strength = (weight) => Math.sqrt(weight);
  const label = (token) => token?.text.trim() || "·"; // a pointer may still stand on what a shorter look no longer has
  const count = (number) => number.toLocaleString("en");
  /** Rows or columns as a person counts them: from 1. */
  const span = (first, last) => (first + 1 === last ? count(last) : `${count(first + 1)}–${count(last)}`);
  const short = (token) => Array.from(label(token)).map((one, at) => (at < 13 ? one : at > 13 ? "" : "…")).join("");
  /** A text that is written from right to left keeps to itself inside another. */
  const apart = (text) => (/[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/.test(text) ? `\u2068${text}\u2069` : text);
  const quoted = (token) => `‘${apart(label(token))}’`;

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

  // --- pictures ------------------------------------------------------------------------------------------------------

  /** The sides from which on a map is shown as tiles, and tokens in a window. */
  const WIDE = 640;
  /** How many rows and columns are shown at once of a part of a long map; and tiles, of the whole. */
  const [LEAST, MOST] = [40, 128];
  /** Whether a map has too many rows or columns to be shown at once. */
  const isLong = ({ pooled, shape: [, ...sides] }) => Boolean(pooled) || Math.max(...sides) > WIDE;
  /** The weight from which on cells are painted darkest: of a long map, where all may be small, one that few tiles
      reach. */
  const darkest = (entry, head) => (isLong(entry) ? kept(entry, `darkest ${head}`, () => {
    const tiles = overview(entry, head, MOST).values.filter((weight) => weight > 0).sort();
    return tiles[Math.floor(0.98 * tiles.length)] ?? 1;
  }) : 1);

  /** The whole of a map as values, row-major, and the tile that each stands for. */
  function overview(entry, head, most) {
    const [high, wide] = stored(entry), own = tileOf(entry), values = weightsOf(entry, head);
    const more = [high, wide].map((side) => Math.ceil(side / most));
    return { values: pool(values, high, wide, more), rows: Math.ceil(high / more[0]), columns: Math.ceil(wide / more[1]),
      tile: own.map((side, axis) => side * more[axis]) };
  }

  /** Weights as a picture of one pixel a cell, in one colour whose opacity is the weight over the darkest. */
  function picture(canvas, values, rows, columns, colour, most = 1) {
    const [red, green, blue] = colour.match(/[\d.]+/g).map(Number);
    canvas.width = columns;
    canvas.height = rows;
    const image = new ImageData(columns, rows), pixels = new Uint32Array(image.data.buffer);
    const base = (blue << 16) | (green << 8) | red;
    values.forEach((weight, index) => { pixels[index] = base | (Math.round(255 * strength(Math.min(1, weight / most))) << 24); });
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
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

  /** How many tokens of a long line are shown at once. */
  const WINDOW = 300;

  /** The tokens as a person reads them: a line for each list that the form names, as for the source and the output. Of a
      long one, a window: what is left out is said below it. */
  class Lines {
    constructor(view) {
      this.view = view;
      this.tokens = {};
      this.parts = {};
      const { tree } = view;
      this.prompt = tree.tokens.key.length ? -1 : Array.from(tree.text.source).length;
      this.element = make("div", { class: "lines" });
      for (const { axis: list, title } of tree.form.lines.filter(({ axis }) => tree.tokens[axis].length)) {
        const part = this.prepare(list);
        this.element.append(make("h3", { "data-of": list }, said(title)), part.line, part.note);
        this.fill(list, list === view.entry?.rows ? view.state.row : 0);
        rove(part.line, ".token");
      }
      this.element.addEventListener("mouseover", (event) => this.enter(event));
      this.element.addEventListener("focusin", (event) => this.enter(event));
      this.element.addEventListener("mouseleave", () => view.rest());
      this.element.addEventListener("click", (event) => this.keep(event));
      this.element.addEventListener("keydown", (event) => ["Enter", " "].includes(event.key) && this.keep(event));
    }

    /** What a line is made of: its text, its tokens as they are read (a list may have the latest first), its elements. */
    prepare(list) {
      const { tree } = this.view, tokens = tree.tokens[list], text = textOf(tree, list);
      const order = range(tokens.length).sort((a, b) => tokens[a].start - tokens[b].start || a - b);
      const long = tokens.length > LONG, windowed = tokens.length > WIDE;
      const line = make("p", { class: long ? "line long" : "line", dir: "auto", "data-of": list });
      const note = make("p", { class: "note window", "data-of": list, hidden: !windowed });
      return (this.parts[list] = { text, characters: Array.from(text), order, line, note, windowed, start: 0 });
    }

    /** Fill a line with its tokens: the text itself where they cover it, small words for the special ones. Of a long line,
        those around one of them. */
    fill(list, around) {
      const part = this.parts[list], tokens = this.view.tree.tokens[list], { text, characters, order, line } = part;
      const most = part.windowed ? WINDOW : order.length;
      part.start = clamp(order.indexOf(around) - Math.floor(most / 2), 0, order.length - most);
      part.end = part.start + most;
      let at = part.start ? tokens[order[part.start - 1]].end : 0;
      this.tokens[list] = [];
      line.replaceChildren();
      for (const index of order.slice(part.start, part.end)) {
        const token = tokens[index], covered = token.end > token.start && token.start >= at;
        const shown = covered ? characters.slice(token.start, token.end).join("") : token.text;
        const gap = characters.slice(at, token.start).join("") + (covered ? shown.match(/^\s*/)[0] : "");
        at = Math.max(at, token.end);
        const element = this.token(list, index, shown.trim() || "·", text !== "" && (!covered || !shown.trim()));
        const between = text ? gap : " ";
        line.append(element.classList.contains("prompt") ? make("span", { class: "prompt" }, between) : between, element);
        this.tokens[list][index] = element;
      }
      line.querySelector(".token").tabIndex = 0;
      part.fresh = part.windowed;
      if (part.windowed) this.tell(list);
      if (this.place) this.mark(this.place);
    }

    /** Say which tokens a window shows, and let it be moved. */
    tell(list) {
      const { start, end, order, note } = this.parts[list], total = order.length;
      const move = (to) => () => {
        this.fill(list, order[clamp(to, 0, total - 1)]);
        this.parts[list].fresh = false;
        this.view.rest();
      };
      const turn = (word, sign, to, off) => make("button", {
        type: "button", name: word, disabled: off, title: say(word), "aria-label": say(word), onclick: move(to) }, sign);
      const middle = Math.floor((start + end) / 2);
      note.replaceChildren(turn("earlier", "‹", middle - WINDOW, !start), " ",
        say("window", { first: count(start + 1), last: count(end), total: count(total) }), " ",
        turn("later", "›", middle + WINDOW, end === total));
    }

    /** See to it that a token is in the window of its line. */
    include(list, index) {
      if (this.parts[list]?.windowed && !this.tokens[list][index]) this.fill(list, index);
    }

    /** Mark the tokens of the source inside [start, end), or none. */
    mark(place) {
      this.place = place;
      this.tokens.key?.forEach((element, index) => {
        const { start, end } = this.view.tree.tokens.key[index];
        element.classList.toggle("found", Boolean(place) && start < place[1] && end > place[0]);
      });
    }

    token(list, index, shown, special) {
      const element = make("span", {
        class: special ? "token special" : "token", role: "button", tabindex: -1,
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

    /** Light up a list of tokens by weight, and frame the one that is asked about; of another list than its own, show
        the best one, unless that was shown before. */
    paint(list, index, other, strengthOf, best) {
      const asked = `${list} ${index} ${best}`, again = asked === this.asked;
      this.asked = asked;
      if (other !== list && best != null && !again) this.include(other, best);
      for (const [name, elements] of Object.entries(this.tokens)) {
        elements.forEach((element, i) => {
          element.style.setProperty("--weight", name === other ? strengthOf(i).toFixed(3) : 0);
          element.classList.toggle("asked", name === list && i === index);
        });
      }
      const own = this.tokens[list]?.[index], shown = this.tokens[other]?.[best];
      if (own && this.parts[list].fresh) this.reveal(own);
      if (own) this.parts[list].fresh = false;
      if (other !== list && shown && !again) this.reveal(shown);
    }

    /** Scroll a long line so that a token of it can be seen. */
    reveal(token) {
      const line = token.parentElement;
      if (line.scrollHeight > line.clientHeight + 4) line.scrollTop = token.offsetTop - line.clientHeight / 2;
    }

    show(lists) {
      const { input } = this.parts;
      for (const element of this.element.querySelectorAll("[data-of=input]"))
        element.hidden = !lists.includes("input") || (element === input.note && !input.windowed);
    }
  }

  /** The matrix: one picture per map, and a layer above it for the cross hair. Of a long map, tiles; one that is clicked
      on opens, and its tokens are shown. */
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
      this.legend = make("p", { class: "legend" });
      const whole = () => { view.choose({ zoom: null }); this.stage.focus(); };
      this.back = make("button", { type: "button", class: "back", hidden: true, onclick: whole }, say("whole map"));
      this.element = make("section", { class: "matrix", "aria-label": say("matrix") }, make("h2", {}, say("matrix")),
        this.back, this.arcs, this.stage, this.legend, this.note);
      this.stage.addEventListener("pointermove", (event) => this.hover(event));
      this.stage.addEventListener("pointerdown", (event) => this.hover(event));
      this.stage.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && view.rest());
      this.stage.addEventListener("click", (event) => {
        this.hover(event);
        this.take();
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

    /** What is shown of the map: from which row and column on, how many of them, in which tiles, and the weights. */
    frame() {
      const { entry, state } = this.view, [, rows, columns] = entry.shape;
      if (!isLong(entry)) {
        const whole = { row: 0, column: 0, rows, columns, tile: [1, 1] };
        return { ...whole, values: weightsOf(entry, state.head) };
      }
      const { values, tile } = overview(entry, state.head, MOST);
      if (!state.zoom) return { row: 0, column: 0, rows, columns, tile, values };
      const [row, column] = state.zoom.split(",").map(Number), sides = [rows, columns];
      const [high, wide] = tile.map((side, axis) => Math.min(sides[axis], clamp(side, LEAST, MOST)));
      const part = { row: clamp(row, 0, rows - high), column: clamp(column, 0, columns - wide), rows: high, columns: wide };
      return { ...part, tile: [1, 1], values: cells(entry, state.head, part) };
    }

    /** The names of the rows or columns in the frame: tokens, or the numbers of those that tiles begin with. */
    names(list, first, size, tile) {
      const tokens = this.view.tree.tokens[list], numbered = tokens.length > WIDE;
      const name = (at) => [tile > 1 || numbered ? count(at + 1) : null, tile > 1 ? null : short(tokens[at])]
        .filter((part) => part != null).join(" ");
      return range(Math.ceil(size / tile)).map((one) => name(first + one * tile));
    }

    /** Where things are, in CSS pixels, for the width there is. Tiles need not be square. */
    measure(context) {
      const { entry } = this.view, frame = this.frame(), { tile } = frame, tiled = tile[0] * tile[1] > 1;
      const widest = (labels) => Math.max(...labels.map((text) => context.measureText(text).width));
      const names = { rows: this.names(entry.rows, frame.row, frame.rows, tile[0]),
        columns: this.names(entry.columns, frame.column, frame.columns, tile[1]) };
      const rows = names.rows.length, columns = names.columns.length;
      const room = this.stage.clientWidth, left = Math.ceil(widest(names.rows)) + 12, across = widest(names.columns);
      const fit = (right) => Math.max(0.5, Math.min((room - left - right) / columns, 40, tiled ? 24 : 640 / rows));
      const slanted = across > fit(0) - 6, right = slanted ? across * 0.6 : 0, wide = fit(right);
      const high = tiled || wide < 3 ? clamp(640 / rows, 1, 24) : wide;
      const top = slanted ? Math.ceil(across * 0.8) + 14 : 22;
      const width = Math.ceil(left + wide * columns + right + 1), height = Math.ceil(top + high * rows + 1);
      return { ...frame, frame, rows, columns, names, left, top, high, wide, slanted, width, height, tiled };
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
      const { left, top, high, wide, rows, columns, values, tiled } = place, most = darkest(entry, state.head);
      const area = [left, top, wide * columns, high * rows];
      context.strokeStyle = this.ink.line;
      context.strokeRect(left - 0.5, top - 0.5, wide * columns + 1, high * rows + 1);
      this.visible = entry.blocks ? this.hatch(context, area) : null;
      context.drawImage(picture(make("canvas"), values, rows, columns, this.ink.accent, most), ...area);
      const spaced = (cell, room = 14) => (_, index) => index % Math.ceil(room / cell) === 0;
      context.fillStyle = this.ink.quiet;
      range(rows).filter(spaced(high)).forEach((row) => this.write(context, row, null));
      range(columns).filter(spaced(wide, isLong(entry) ? 20 : 14)).forEach((column) => this.write(context, null, column));
      if (state.hard && !tiled) this.mark(context);
      this.back.hidden = !isLong(entry) || !state.zoom;
      this.tell(most);
    }

    /** Hatch what is not seen, behind the whole map, and lay paper over the rest; which cells that is. */
    hatch(context, area) {
      const { entry } = this.view, { frame, rows, columns, tiled } = this.place;
      const lines = make("canvas", { width: 6, height: 6 }), pen = lines.getContext("2d");
      pen.strokeStyle = this.ink.quiet;
      pen.globalAlpha = 0.35;
      for (const shift of [-6, 0, 6]) {
        pen.moveTo(shift, 6);
        pen.lineTo(shift + 6, 0);
      }
      pen.stroke();
      context.fillStyle = context.createPattern(lines, "repeat");
      context.fillRect(...area);
      const tiles = tiled ? seenTiles(entry, frame.tile) : null;
      const visible = Float32Array.from({ length: rows * columns }, (_, at) => Number(tiles ? tiles[at]
        : seen(entry, frame.row + Math.floor(at / columns), frame.column + (at % columns))));
      context.drawImage(picture(make("canvas"), visible, rows, columns, this.ink.paper), ...area);
      return visible;
    }

    /** What is shown and what is left out, in words; and what the colours mean. */
    tell(most) {
      const { entry } = this.view, { frame, tiled } = this.place, [, height, width] = entry.shape, [high, wide] = frame.tile;
      const rows = span(frame.row, frame.row + frame.rows), columns = span(frame.column, frame.column + frame.columns);
      const told = [tiled ? say("tiles", { rows: count(high), columns: count(wide) }) : say("keys")];
      if (isLong(entry) && !tiled)
        told.push(say("zoomed in", { rows, columns, height: count(height), width: count(width) }));
      if (isPicture(entry)) told.push(say("picture"));
      else if (entry.top && !tiled) told.push(say("top cells", { count: entry.top.count }));
      this.note.textContent = told.join(" ");
      const swatch = (weight, name, kind = "swatch") => {
        const one = make("span", { class: kind });
        one.style.setProperty("--weight", strength(weight));
        return make("span", {}, one, name);
      };
      const name = (weight) => percent(weight, most === 1 ? 0 : Math.max(1, finely(weight / 10)));
      this.legend.replaceChildren(
        ...[0.01, 0.1, 0.25, 0.5].map((share) => swatch(share, name(share * most))),
        swatch(1, `${most === 1 ? "" : "≥ "}${name(most)}`),
        ...(entry.blocks ? [swatch(0, say("unseen"), "swatch unseen-part")] : []));
    }

    /** The label of a row or a column. */
    write(context, row, column) {
      const { left, top, high, wide, slanted, names } = this.place;
      context.save();
      if (row != null) {
        context.textAlign = "right";
        context.fillText(names.rows[row], left - 7, top + (row + 0.5) * high + 1);
      } else {
        context.translate(left + (column + 0.5) * wide, top - 7);
        if (slanted) context.rotate(-0.9);
        context.textAlign = slanted ? "left" : "center";
        context.fillText(names.columns[column], slanted ? 2 : 0, slanted ? -2 : -4);
      }
      context.restore();
    }

    /** Hard alignment: a dot on the strongest cell of each row. */
    mark(context) {
      const { left, top, high, wide, rows, columns, frame } = this.place, { entry, state } = this.view;
      context.fillStyle = this.ink.mark;
      for (let row = 0; row < rows; row++) {
        const found = rowOf(entry, state.head, frame.row + row), [at] = found ? strongest(found.weights, 1) : [];
        const best = (found?.columns ? found.columns[at] : at) - frame.column;
        if (!(best >= 0 && best < columns)) continue;
        context.beginPath();
        context.arc(left + (best + 0.5) * wide, top + (row + 0.5) * high, clamp(Math.min(high, wide) * 0.16, 1, 5), 0, 7);
        context.fill();
      }
    }

    /** The cell that a row or a column of the map is in, if it is in the frame. */
    cellAt(row, column) {
      const { frame, rows, columns } = this.place;
      const at = (one, first, tile, most) => {
        const found = one == null ? -1 : Math.floor((one - first) / tile);
        return found >= 0 && found < most ? found : null;
      };
      return [at(row, frame.row, frame.tile[0], rows), at(column, frame.column, frame.tile[1], columns)];
    }

    /** The cross hair on a row, a column, or a cell of the map. */
    point(row, column) {
      const { left, top, high, wide, rows, columns, width, height } = this.place, context = this.above.getContext("2d");
      const [line, across] = this.cellAt(row, column), small = Math.min(high, wide);
      Object.assign(this, { row, column });
      context.clearRect(0, 0, width, height);
      context.fillStyle = this.ink.text;
      context.strokeStyle = small < 6 ? this.ink.mark : this.ink.text;
      context.lineWidth = small < 6 ? 0.5 : 1;
      if (line != null) context.strokeRect(left - 0.5, top + line * high - 0.5, wide * columns + 1, high + 1);
      if (across != null) context.strokeRect(left + across * wide - 0.5, top - 0.5, wide + 1, high * rows + 1);
      if (high >= 14 && line != null) this.write(context, line, null);
      if (wide >= 14 && across != null) this.write(context, null, across);
      const both = line != null && across != null;
      this.tip.hidden = !both;
      if (!both) return;
      context.strokeStyle = this.ink.mark;
      context.lineWidth = 2;
      context.strokeRect(left + across * wide, top + line * high, wide, high);
      this.tip.textContent = this.describe(line, across);
      const most = Math.max(0, this.stage.clientWidth - this.tip.offsetWidth);
      this.tip.style.left = `${Math.min(left + (across + 1) * wide + 8, most)}px`;
      this.tip.style.top = `${top + (line + 1) * high + 8}px`;
    }

    /** Whether anything is seen in a tile. */
    isSeen(line, across) { return !this.visible || Boolean(this.visible[line * this.place.columns + across]); }

    /** Who looks at whom in a cell, or which rows at which columns in a tile, and how much. */
    describe(line, across) {
      const { entry } = this.view, { frame, columns, values, tiled } = this.place, [, rows, wide] = entry.shape;
      if (!tiled) {
        const { query, key, weight, hidden } = this.view.cell(frame.row + line, frame.column + across);
        return `${apart(label(query))} → ${apart(label(key))}  ${hidden ? say("unseen") : percent(weight)}`;
      }
      const part = (at, size, most) => span(at * size, Math.min(most, (at + 1) * size));
      if (!this.isSeen(line, across)) return say("unseen");
      return say("tile", { rows: part(line, frame.tile[0], rows), columns: part(across, frame.tile[1], wide),
        percent: percent(values[line * columns + across]) });
    }

    hover(event) {
      const { left, top, high, wide, rows, columns } = this.place, box = this.base.getBoundingClientRect();
      const line = Math.floor((event.clientY - box.top - top) / high);
      const across = Math.floor((event.clientX - box.left - left) / wide);
      if (line < 0 || across < 0 || line >= rows || across >= columns) return this.view.rest();
      this.reach(line, across);
    }

    /** Somebody asks about a cell of the frame. */
    reach(line, across, spoken = false) {
      const { frame, tiled } = this.place;
      const row = frame.row + line * frame.tile[0], column = frame.column + across * frame.tile[1];
      if (row === this.row && column === this.column) return;
      if (!tiled) return this.view.pointCell(row, column, spoken);
      this.point(row, column);
      if (spoken) announce(this.tip.textContent);
    }

    /** Keep the row that is pointed at; open the tile. */
    take() {
      const { tiled } = this.place;
      if (this.row == null) return;
      if (!tiled) return this.view.choose({ row: this.row });
      if (this.column == null || isPicture(this.view.entry) || !this.isSeen(...this.cellAt(this.row, this.column))) return;
      this.view.choose({ zoom: `${this.row},${this.column}`, row: this.strongestRow() });
    }

    /** The row of a tile with the largest weight in it. */
    strongestRow() {
      const { entry, state } = this.view, { frame: { tile } } = this.place, [, rows, columns] = entry.shape;
      const part = { row: this.row, column: this.column, rows: Math.min(tile[0], rows - this.row),
        columns: Math.min(tile[1], columns - this.column) };
      const [at] = strongest(cells(entry, state.head, part), 1);
      return part.row + Math.floor(at / part.columns);
    }

    move(event) {
      const { rows, columns } = this.place;
      const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (event.key === "Enter") this.take();
      if (event.key === "Escape" && !this.back.hidden) this.view.choose({ zoom: null });
      if (!by) return;
      event.preventDefault();
      const [line, across] = this.cellAt(this.row, this.column);
      const start = across == null ? [line ?? 0, 0] : [(line ?? 0) + by[0], across + by[1]];
      this.reach(clamp(start[0], 0, rows - 1), clamp(start[1], 0, columns - 1), true);
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
      for (const { entry, head, canvas } of this.buttons) {
        const { values, rows, columns } = overview(entry, head, 48);
        picture(canvas, values, rows, columns, colour, darkest(entry, head));
      }
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
    const bar = make("span", { class: "gauge" }, percent(share, finely(share)));
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
      Object.assign(this, { container, tree, options, gone: new AbortController(), fetched: new WeakSet(), done: new WeakSet() });
      container.regard?.gone.abort();
      container.regard = this;
      this.state = this.checked(options.state ?? {});
      this.build();
      announce(`${say("answer")}: ${tree.text.target}`);
    }

    /** The map that is chosen. */
    get entry() { return this.tree.maps.find((entry) => entry.name === this.state.map); }

    /** A state that fits this tree, whatever a link said. */
    checked({ map, head, row, zoom, hard, calculator }) {
      const { maps } = this.tree;
      const entry = maps.find((other) => other.name === map) ?? maps.filter(isAcross).at(-1) ?? maps.at(-1);
      const [heads, rows] = entry?.shape ?? [0, 1];
      const one = Number.parseInt(head, 10), line = Number.parseInt(row ?? this.first(entry), 10) || 0;
      return { map: entry?.name, head: one >= 0 && one < heads ? one : "mean", row: clamp(line, 0, rows - 1),
        zoom: entry && isLong(entry) && /^\d+,\d+$/.test(zoom) && !isPicture(entry) ? zoom : null, hard: Boolean(hard), calculator: Boolean(calculator) };
    }

    /** The row that is shown first: the likeliest of the bars; the first token that was written. */
    first(entry) {
      const { form, scores } = this.tree;
      if (entry?.rows !== "query") return 0;
      if (form.answers === "bars") return scores.logprobs.indexOf(Math.max(...scores.logprobs));
      return form.answer === "line" ? unscored(this.tree) : 0;
    }

    /** What the form says of a map and those with the same rows and columns. */
    group(entry) {
      const { grids = {} } = this.tree.image ?? {};
      const [rows, columns] = [entry.rows, entry.columns].map((axis) => (axis in grids ? "key" : axis));
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
        this.flags(), this.given(), this.lines.element, make("div", { class: "beside" }, this.over(), this.looks, this.others()));
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

    /** The image that was looked at; a cell of it that looks itself can be chosen. */
    over() {
      if (!this.tree.image) return null;
      const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
      const colours = () => ({ mark: "#e4007c", accent: colour("--accent") || "#4338ca" });
      const onchoose = (axis, row) => { if (this.entry?.rows === axis) this.choose({ row }); };
      this.overlay = new RegardImage.Overlay(this.tree.image, { make, say, percent, colours }, {
        onpoint: (axis, cell, spoken) => this.point(axis, cell, spoken), onrest: () => this.rest(), onchoose });
      return this.overlay.element;
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
      const tokens = tree.tokens[entry.rows];
      const rows = tokens.length <= WIDE && tokens.map((token, row) => [row, `${row + 1}  ${label(token)}`]);
      const onchange = (event) => this.choose({ hard: event.target.checked });
      const hard = make("input", { type: "checkbox", name: "hard", checked: state.hard, onchange });
      const json = () => save(new Blob([JSON.stringify(tree)], { type: "application/json" }), "regard.json");
      return [
        this.select("map", tree.maps.map((other) => [other.name, this.titleOf(other)])), this.select("head", heads),
        rows ? this.select("row", rows) : this.number("row", tokens.length), make("label", { class: "check" }, hard, say("hard")),
        make("span", { class: "saves" }, this.saving("PNG", () => this.matrix.download()), this.saving("JSON", json)),
      ];
    }

    select(name, pairs) {
      const chosen = String(this.state[name]), onchange = (event) => this.choose({ [name]: event.target.value });
      const options = pairs.map(([value, text]) => make("option", { value, selected: String(value) === chosen }, text));
      return make("label", {}, say(name), make("select", { name, onchange }, ...options));
    }

    /** A row by its number, where there are too many for a list. */
    number(name, most) {
      const onchange = (event) => this.choose({ [name]: clamp(Math.round(event.target.value) || 1, 1, most) - 1 });
      const value = this.state[name] + 1;
      return make("label", {}, say(name), make("input", { type: "number", name, min: 1, max: most, value, onchange }));
    }

    saving(format, onclick) {
      const title = say("save", { format });
      return make("button", { type: "button", name: format, title, "aria-label": title, onclick }, `↓ ${format}`);
    }

    /** Change what is shown; the rest follows. */
    choose(changes) {
      const same = Object.entries(changes).every(([name, value]) => this.state[name] === value);
      if (same || this.gone.signal.aborted || !this.tree.maps.length) return;
      const other = changes.map && changes.map !== this.state.map ? { zoom: null } : {};
      this.state = this.checked({ ...this.state, ...other, ...changes });
      this.failure = null;
      if (changes.row != null) this.lines.include(this.entry.rows, this.state.row);
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
      if (!options.fetchMap || !((isPicture(entry) && !this.fetched.has(entry)) || vectors)) return;
      this.fetched.add(entry);  // whatever it has room for
      try {
        const whole = await options.fetchMap(entry.name, state.calculator);
        forget(entry);
        Object.assign(entry, whole);
        this.done.add(entry);
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
      const asked = this.asked(list);
      if (!asked) return;
      const { entry, head, turned } = asked, other = turned ? entry.rows : entry.columns;
      const found = turned ? columnOf(entry, head, index) : rowOf(entry, head, index);
      const { columns = [], weights = [] } = found ?? {}, most = darkest(entry, head);
      const best = strongest(weights, 5).map((at) => ({ index: columns?.[at] ?? at, weight: weights[at] }));
      const known = columns && new Map(Array.from(columns, (column, at) => [column, weights[at]]));
      const strengthOf = (at) => strength(Math.min(1, ((known ? known.get(at) : weights[at]) ?? 0) / most));
      this.lines.paint(list, index, other, strengthOf, best[0]?.index);
      if (entry === this.entry && isPicture(entry) && this.options.fetchMap && !this.failure && !this.done.has(entry))
        this.looks.replaceChildren(make("h3", {}, say("waiting")));  // until the true weights are here
      else this.list(this.tree.tokens[list][index], other, best, turned, this.omitted(entry, head, found, turned), spoken);
      if (entry === this.entry) this.matrix.point(turned ? null : index, turned ? index : null);
      if (!turned) this.cover(entry, index, columns, found && weights);
    }

    /** Lay a row of a map over the image that it looks at. */
    cover(entry, row, columns, weights) {
      const { grids = {} } = this.tree.image ?? {};
      if (!(entry.columns in grids)) return;
      const dense = columns && weights ? new Float32Array(entry.shape[2]) : weights;
      if (dense !== weights) columns.forEach((column, at) => { dense[column] = weights[at]; });
      const name = quoted(this.tree.tokens[entry.rows][row]), isCell = entry.rows in grids;
      this.overlay.show(isCell ? say("cell of", { name }) : name, entry.columns, dense, isCell ? row : null);
    }

    /** What of a row or a column is not there, in words. */
    omitted(entry, head, found, turned) {
      const { top, blocks, shape } = entry;
      if (!found) return say("picture");
      if (top && turned) return say("top column", { count: top.count });
      const total = count(shape[2]);
      if (top && head === "mean" && shape[0] > 1)
        return say("top mean", { count: top.count, total, percent: percent(found.left, 1) });
      if (top) return say("top", { count: found.columns.length, total, percent: percent(found.left, 1) });
      return blocks?.weights && !turned ? say("part", { count: count(found.columns.length), total }) : null;
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
        weight: cellOf(entry, state.head, row, column), hidden: !seen(entry, row, column) };
    }

    pointCell(row, column, spoken = false) {
      this.lines.include(this.entry.rows, row);
      const { query, key, weight } = this.cell(row, column), names = { query: quoted(query), key: quoted(key) };
      this.point(this.entry.rows, row);
      this.matrix.point(row, column);
      if (spoken) announce(say("cell", { row: row + 1, column: column + 1, ...names, percent: percent(weight) }));
    }

    /** The five strongest, with their numbers; those of a long list can be gone to. */
    list(token, other, best, turned, omitted, spoken) {
      const tokens = this.tree.tokens[other], long = tokens.length > WIDE;
      const strongest = best.filter(({ weight }, place) => !place || weight >= 0.0005 || (long && weight > 0));
      const title = say(turned ? "seen" : "looks", { token: quoted(token) });
      const go = (index) => () => { this.lines.include(other, index); this.rest(); };
      const name = (index) => (long && this.lines.parts[other]
        ? make("button", { type: "button", class: "plain", onclick: go(index) }, label(tokens[index]),
          make("small", {}, ` ${count(index + 1)}`))
        : label(tokens[index]));
      const item = ({ index, weight }) => make("li", {}, make("bdi", {}, name(index)), gauge(weight));
      this.looks.classList.toggle("sentences", this.tree.tokens.key.some(({ text }) => text.length > 24));
      this.looks.replaceChildren(make("h3", {}, title), make("ol", {}, ...strongest.map(item)),
        ...(omitted ? [make("p", { class: "note" }, omitted)] : []));
      const first = strongest.slice(0, 3).map(({ index, weight }) => `${label(tokens[index])} ${percent(weight)}`);
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
