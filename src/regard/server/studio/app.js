/* The studio: choose a run, type, see the answer and what the model looked at. The drawing is view.js's. What a run is
   asked with, and what its task is called, is in the form that the server sends with it. */
"use strict";

(() => {
  const { say, said, make, link, words } = Regard;
  Object.assign(words.en, {
    tagline: "what a model looks at while it answers", skip: "Skip to the answer", model: "Run",
    hint: "Ctrl or ⌘ + Enter asks at once.", live: "while typing", settings: "Decoding",
    reset: "As the run has it", "key field": "API key", copy: "Copy link", copied: "Copied",
    looking: "What the model looked at",
    beam_size: "Beam", length_penalty: "Length penalty", no_repeat_ngram: "No repeat of n-grams of size",
    best: "Answers", sample: "Sample", temperature: "Temperature", top_k: "Top k", top_p: "Top p", seed: "Seed",
    off: "off",
    "bad key": "A key has plain letters, digits and signs only.",
    gone: "{model} is not served here. Choose a run, then ask.",
    "status 401": "This server wants an API key.", "status 429": "Too many texts wait already. Ask again in a moment.",
    "status 503": "The server is stopping, or too busy to answer in time.",
    nobody: "The server does not answer. Is it still running?", strange: "The server answered {status}.",
    changed: "The answer has changed meanwhile; ask again.", longest: "at most {count} tokens",
    none: "This server has no run to ask.", stop: "Stop", max_tokens: "Tokens at most", writing: "Continuation",
    random: "random", drop: "Choose an image, drop it anywhere on this page, or paste it.",
  });
  Object.assign(words.ko, {
    tagline: "모델이 답하면서 바라보는 곳", skip: "답으로 건너뛰기", model: "모델",
    hint: "Ctrl 또는 ⌘ + Enter를 누르면 바로 답합니다.", live: "입력하는 동안", settings: "디코딩 설정", reset: "기본값으로",
    "key field": "API 키", copy: "링크 복사", copied: "복사했습니다", looking: "모델이 본 것",
    beam_size: "빔 크기", length_penalty: "길이 벌점", no_repeat_ngram: "반복하지 않을 n-그램 크기", best: "답의 수",
    sample: "샘플링", temperature: "온도", top_k: "상위 k", top_p: "상위 p", seed: "시드", off: "끔",
    "bad key": "API 키에는 영문자, 숫자, 기호만 쓸 수 있습니다.", gone: "{model} 모델은 이 서버에 없습니다. 다른 모델을 고른 뒤 물어보세요.",
    "status 401": "이 서버를 쓰려면 API 키가 필요합니다.", "status 429": "기다리는 텍스트가 너무 많습니다. 잠시 뒤에 다시 물어보세요.",
    "status 503": "서버가 멈추는 중이거나 너무 바빠서 제때 답하지 못합니다.",
    nobody: "서버가 응답하지 않습니다. 아직 실행 중인가요?", strange: "서버가 {status}(으)로 답했습니다.",
    changed: "그사이 답이 바뀌었습니다. 다시 물어보세요.", longest: "최대 {count}토큰", none: "이 서버에는 물어볼 모델이 없습니다.",
    stop: "멈추기", max_tokens: "최대 토큰 수", writing: "이어 쓴 글", random: "무작위",
    drop: "그림을 고르거나, 이 페이지에 끌어다 놓거나, 붙여 넣으세요.",
  });

  const part = (id) => document.getElementById(id);
  /** What settings of decoding may be. */
  const FIELDS = {
    beam_size: { min: 1, max: 64, step: 1 }, length_penalty: { min: 0, max: 10, step: 0.1 },
    no_repeat_ngram: { min: 0, max: 32, step: 1 }, best: { min: 1, max: 10, step: 1 },
    sample: { type: "checkbox" }, temperature: { min: 0, step: 0.05 }, top_k: { min: 1, step: 1 },
    top_p: { min: 0.01, max: 1, step: 0.01 }, max_tokens: { min: 1, step: 1 }, seed: { min: 0, step: 1 },
  };
  const SAMPLING = ["temperature", "top_k", "top_p", "seed"], SEARCHING = ["beam_size", "length_penalty"];
  const DELAY = 350;
  /** What stands for an emptied field of a run that has a number there. */
  const OFF = { top_k: 1e6, top_p: 1 };
  /** What settings are called in old links. */
  const OLD = { beam: "beam_size", no_repeat: "no_repeat_ngram" };
  /** What is shown until the server has said what its runs are asked with. */
  const FORM = {
    fields: [{ name: "text", label: { en: "Text", ko: "텍스트" }, rows: 4 }],
    submit: { en: "Answer", ko: "답하기" },
    empty: { en: "Type something, and the answer appears here.", ko: "무엇이든 입력하면 여기에 답이 나옵니다." },
    settings: [], best: 1, streams: false,
  };
  /** What was typed into fields that may not be there now. */
  const typed = {};
  /** The form that is on the page. */
  let form = null;
  let models = null, shown = null, state = {}, asking = null, looking = null, waiting = null, chosen = null, timer = 0;

  // --- the server ---------------------------------------------------------------------------------------------------

  /** A request, with the key if there is one. */
  async function send(path, body, signal) {
    const headers = { "Content-Type": "application/json" }, key = part("key").value;
    if (!/^[\x20-\x7e]*$/.test(key)) throw new Error(say("bad key"));
    if (key) headers.Authorization = `Bearer ${key}`;
    const options = body ? { method: "POST", headers, signal, body: JSON.stringify(body) } : { headers, signal };
    return fetch(path, options).catch(lost);
  }

  /** A connection that broke off, in words; a question that was overtaken stays one. */
  function lost(error) {
    throw error.name === "AbortError" ? error : new Error(say("nobody"));
  }

  /** What the server said instead of an answer: in the person's language what can be, else in its own words. */
  function refused(response, answer) {
    const { status } = response, known = `status ${status}`;
    const own = words.en[known] ? null : told(answer);
    part("locked").hidden &&= status !== 401;
    const said = own || say(words.en[known] ? known : "strange", { status });
    return Object.assign(new Error(said), { status, foreign: Boolean(own) });
  }

  /** JSON from the server; what goes wrong is an Error with words for a person. */
  async function call(path, body, signal) {
    const response = await send(path, body, signal);
    const broken = (error) => (response.ok || error.name === "AbortError" ? lost(error) : {});
    const answer = await response.json().catch(broken);
    if (!response.ok) throw refused(response, answer);
    return answer;
  }

  /** What an error says, in our form or OpenAI's. */
  const told = ({ error }) => error?.message ?? error;

  /** What the form asks for. */
  const question = () => {
    const asked = { model: part("model").value, packed: true, ...given() };
    if (form.streams) return asked;
    if (!form.settings.length) return { ...asked, best: form.best };
    const { best, ...settings } = changes();
    return { ...asked, best: best ?? answers(settings.beam_size), settings };
  };
  /** Whether there is enough of a question to be asked; a text that is written may begin with nothing. */
  const complete = (asked) =>
    Boolean(asked.model && (form.streams || form.fields.every(({ name }) => asked[name].trim())));

  /** Ask, and show the answer; a question that is overtaken is dropped. */
  async function ask() {
    clearTimeout(timer);
    if (!models) return start();
    asking?.abort();
    looking?.abort();
    const mine = (asking = waiting = new AbortController()), asked = question();
    chosen = null;
    remember();
    if (!complete(asked)) {
      waiting = null;
      complain(null);
      return greet();
    }
    busy(true);
    try {
      if (form.streams) await write(asked, mine);
      else await look(asked, mine.signal);
      complain(null);
    } catch (error) {
      if (error.name !== "AbortError") {
        if (!form.streams) clear();  // what is shown answers another question; a stream has cleared it
        complain(error);
      }
    } finally {
      if (asking === mine) {
        waiting = null;
        busy(false);
      }
    }
  }

  /** What a model looked at, drawn. Of another text, another bar comes first. */
  async function look(asked, signal, before) {
    const full = state.map ? [state.map] : [], there = shown?.tree.maps.some(({ name }) => name === state.map);
    const vectors = state.calculator && there ? full : [];
    const tree = await call("v1/look", { ...asked, full, vectors }, signal);
    const differs = ({ name }) => shown.asked[name] !== asked[name];
    if (shown && tree.form.answers === "bars" && tree.form.fields.some(differs)) delete state.row;
    if (before) tree.answers = before.tree.answers;
    if (before && tree.text.target === tree.answers[0].text) tree.flags = before.flags;
    shown = { tree, asked, flags: before ? before.flags : tree.flags };
    draw();
  }

  /** Look at another of the answers that are shown. */
  async function lookAt(target) {
    if (waiting || !shown) return;
    looking?.abort();
    const mine = (looking = new AbortController());
    busy(true);
    try {
      await look({ ...shown.asked, target }, AbortSignal.any([mine.signal, asking.signal]), shown);
      chosen = target;
      remember();
      complain(null);
      part("view").querySelector('.others [aria-current="true"] button')?.focus();
    } catch (error) {
      if (error.name !== "AbortError") complain(error);
    } finally {
      if (looking === mine && !waiting) busy(false);
    }
  }

  /** Let the model go on, and show each token as it comes; then what they looked at. */
  async function write(asked, mine) {
    const { model: name, [main().name]: prompt } = asked;
    const { temperature, top_p: top, max_tokens: most, seed } = { ...defaults(), ...changes() };
    const body = { model: name, prompt, temperature, top_p: top, max_tokens: most, seed, stream: true, logprobs: 0 };
    const line = make("p", { class: "line written", dir: "auto" }, make("span", { class: "prompt" }, prompt));
    const card = make("section", { class: "answer" }, make("h2", {}, say("writing")), line);
    let target = "";
    if (shown) delete state.row;  // of another text, another token comes first
    clear();
    for await (const { text, logprobs } of chunks(body, mine)) {
      if (!target) {
        clear(card);
        card.scrollIntoView({ block: "nearest" });
      }
      const below = line.scrollHeight - line.scrollTop - line.clientHeight;
      target += text;
      const chance = Math.exp(logprobs?.token_logprobs.at(-1) ?? 0);
      const token = make("span", { class: "token", "data-percent": Regard.percent(chance, 1) }, text);
      token.style.setProperty("--sure", chance);
      line.append(token);
      if (below < 40) line.scrollTop = line.scrollHeight;
    }
    Regard.announce(`${say("writing")}: ${target}`);
    part("stop").hidden = true;
    if (!prompt.trim()) return;
    await look({ ...asked, target }, mine.signal);
  }

  /** The chunks of a stream of completions, until it ends or is stopped. */
  async function* chunks(body, mine) {
    const stopped = new AbortController(), signal = AbortSignal.any([mine.signal, stopped.signal]);
    part("stop").hidden = false;
    part("stop").onclick = () => stopped.abort();
    try {
      const response = await send("v1/completions", body, signal);
      if (!response.ok) throw refused(response, await response.json().catch(() => ({})));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = "", done = false, value; !done;) {
        ({ done, value = "" } = await reader.read().catch(lost));
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events.filter((one) => one !== "data: [DONE]")) {
          const tree = JSON.parse(event.slice("data: ".length));
          if (tree.error) throw new Error(told(tree));
          yield tree.choices[0];
        }
      }
    } catch (error) {
      if (error.name !== "AbortError" || mine.signal.aborted) throw error;
    } finally {
      if (asking === mine) part("stop").hidden = true;
    }
  }

  /** One map of the answer that is shown, in full. */
  async function fetchMap(name, withVectors) {
    const { asked, tree } = shown;
    const whole = await call("v1/look", { ...asked, full: [name], vectors: withVectors ? [name] : [] }, asking.signal);
    if (whole.text.target !== tree.text.target) throw new Error(say("changed"));
    return whole.maps.find((entry) => entry.name === name);
  }

  // --- the page -----------------------------------------------------------------------------------------------------

  function draw() {
    if (!shown) return greet();
    const onstate = (changed) => { state = changed; remember(); };
    const onanswer = searches(shown.tree.form) ? lookAt : null;
    state = Regard.view(part("view"), shown.tree, { state, onstate, fetchMap, onanswer }).state;
    remember();
  }

  function greet() {
    busy(false);
    clear(make("p", { class: "empty" }, models?.length === 0 ? say("none") : said(form.empty)));
  }

  /** Show no answer, but this. */
  function clear(...instead) {
    shown = null;
    Regard.replace(part("view"), ...instead);
  }

  function busy(on) {
    part("view").setAttribute("aria-busy", on && !form.streams);
    part("stop").hidden = true;
  }

  function complain(error) {
    part("error").hidden = !error;
    part("error").textContent = error?.message ?? "";
    part("error").lang = error?.foreign ? "en" : document.documentElement.lang;
    if (error?.status === 401) part("key").focus();
  }

  const model = () => models?.find((other) => other.id === part("model").value);
  /** Whether answers are searched for, so that others than the best can be looked at. */
  const searches = ({ settings, streams }) => settings.length > 0 && !streams;

  /** Fill every marked element with the words of the language. */
  function translate() {
    for (const element of document.querySelectorAll("[data-word]")) element.textContent = say(element.dataset.word);
    part("view").setAttribute("aria-label", say("looking"));
    describe();
  }

  /** What the chosen run is, and what its form says. */
  function describe() {
    for (const { name, label } of form.fields) input(name).labels[0].textContent = said(label);
    for (const label of part("fields").children) {
      label.firstChild.textContent = say(label.dataset.field);
      label.lastChild.placeholder = say(label.dataset.field === "seed" ? "random" : "off");
    }
    part("submit").textContent = said(form.submit);
    const { about, source, target, max_length: longest } = model() ?? {};
    const languages = source && target ? `${source} → ${target}` : null;
    const most = longest && say("longest", { count: longest });
    part("about").textContent = [about, languages, most].filter(Boolean).join(" · ");
  }

  // --- the form -----------------------------------------------------------------------------------------------------

  const input = (name) => part(`field-${name}`);
  /** The field with the text itself, which is the last one. */
  const main = () => form.fields.at(-1);
  /** Whether a field takes an image; what it has is then its data. */
  const isImage = ({ kind }) => kind === "image";
  /** What was typed or chosen, by the names of the fields. */
  const given = () => Object.fromEntries(form.fields.map(({ name }) => [name, input(name).data ?? input(name).value]));
  /** The same without images, for links. */
  const worded = () => Object.fromEntries(form.fields.filter((one) => !isImage(one)).map(({ name }) => [name, input(name).value]));

  /** Give the page the form that the chosen run wants; what was typed stays. */
  function build() {
    const wanted = model()?.form ?? FORM, before = [...part("inputs").querySelectorAll("[name]")];
    if (wanted === form) return;
    form = wanted;
    const texts = before.filter((one) => one.type !== "file"), focused = before.find((one) => one === document.activeElement);
    const text = texts.at(-1)?.value ?? typed.text ?? "";
    for (const { name, value } of texts) typed[name] = value;
    const made = form.fields.flatMap((field) => {
      if (isImage(field)) return [make("label", { for: `field-${field.name}` }), imageOf(field)];
      const one = fieldOf(field, before), last = field === main();
      one.value = last ? text : typed[field.name] ?? "";
      if (last) one.setAttribute("aria-describedby", "hint");
      else one.removeAttribute("aria-describedby");
      return [make("label", { for: one.id }), one];
    });
    part("inputs").replaceChildren(...made);
    if (focused) (input(focused.name) ?? input(main().name)).focus();
    part("fields").replaceChildren(...form.settings.map(settingOf));
    part("settings").hidden = !form.settings.length;
    part("live-label").hidden = form.streams || isImage(main());
    part("hint").dataset.word = isImage(main()) ? "drop" : "hint";
    part("hint").textContent = say(part("hint").dataset.word);
  }

  /** An element to type into: one that is there already, so that its cursor stays, or a new one. */
  function fieldOf({ name, rows = 1 }, there) {
    const tag = rows === 1 ? "input" : "textarea", same = (one) => one.name === name && one.localName === tag;
    const one = there.find(same) ?? make(tag, {
      id: `field-${name}`, name, dir: "auto", spellcheck: "false", autocomplete: "off", oninput: later });
    if (rows > 1) one.rows = rows;
    return one;
  }

  const images = {};
  /** The field of an image, which stays when another run is chosen. */
  function imageOf({ name }) {
    const ask = () => part("ask").requestSubmit();
    images[name] ??= RegardImage.field(make, `field-${name}`, name, ask);
    images[name].querySelector("input").setAttribute("aria-describedby", "hint");
    return images[name];
  }

  /** A setting of decoding and its name; one that is not known here is on or off, or a number, as the run has it. */
  function settingOf(name) {
    const switched = typeof model()?.decode[name] === "boolean";
    const attributes = FIELDS[name] ?? (switched ? { type: "checkbox" } : { step: "any" });
    const one = make("input", { name, type: "number", ...attributes, oninput: () => { permit(); later(); } });
    one.addEventListener("change", () => {
      if (one.value === "" && !(name in OFF)) one.value = defaults()[name] ?? "";
    });
    return make("label", { "data-field": name, class: attributes.type && "check" }, "", one);
  }

  // --- settings -----------------------------------------------------------------------------------------------------

  /** How many answers to ask for: no more than the search keeps anyway, so that asking does not change the first. */
  const answers = (beam) =>
    (form.settings.includes("beam_size") ? Math.min(form.best, beam ?? model().decode.beam_size) : form.best);
  const defaults = () => {
    const { decode, max_length: longest } = model() ?? {};
    if (!form.streams) return { best: answers(), ...decode };
    const { sample, temperature, top_p: top } = decode;
    return { temperature: sample ? temperature : 0, top_p: top, max_tokens: Math.min(200, Math.ceil(longest / 2)) };
  };
  const setting = (name) => part("fields").querySelector(`[name=${name}]`);

  /** The value of a field as the server wants it; empty is off. */
  function valueOf(field) {
    if (field.type === "checkbox") return field.checked;
    return field.value === "" ? null : Number(field.value);
  }

  /** The settings that differ from the run's own. */
  function changes() {
    const own = defaults(), all = form.settings.map((name) => [name, valueOf(setting(name))]);
    const differ = all.filter(([name, value]) => value !== (own[name] ?? null));
    const sent = differ.map(([name, value]) => [name, value ?? OFF[name]]);
    return Object.fromEntries(sent.filter(([, value]) => value != null));
  }

  /** Set the fields to the run's own settings, then to the given ones. */
  function set(values = {}) {
    for (const name of form.settings) {
      const value = values[name] ?? defaults()[name];
      if (setting(name).type === "checkbox") setting(name).checked = String(value) === "true";
      else setting(name).value = value ?? "";
    }
    permit();
  }

  /** Only the settings that count can be changed. */
  function permit() {
    const sampled = setting("sample")?.checked, off = { true: SEARCHING, false: SAMPLING }[sampled] ?? [];
    for (const name of form.settings) setting(name).disabled = off.includes(name);
  }

  // --- links --------------------------------------------------------------------------------------------------------

  /** Keep everything in the address. */
  function remember() {
    const { map, head, row, zoom, hard, calculator } = state, { lang: language } = document.documentElement;
    if (!models) return link.write({ ...link.read(), language });
    const settings = changes(), asked = { model: part("model").value, ...worded(), answer: chosen };
    if (settings.sample === false) settings.sample = "false";
    return link.write({ ...asked, ...settings, map, head, row, zoom, hard, calculator, language });
  }

  /** Make the page what its address says. In old links, the last field of every form is the text. */
  function restore() {
    if (!models) return;
    const { model: id, answer, map, head, row, zoom, hard, calculator, ...rest } = link.read();
    const gone = id && models.length && !models.some((other) => other.id === id);
    Regard.speak(Regard.preferred());
    part("language").value = document.documentElement.lang;
    if (models.some((other) => other.id === id)) part("model").value = id;
    build();
    for (const field of form.fields.filter((one) => !isImage(one)))
      input(field.name).value = rest[field.name] ?? (field === main() ? rest.text : null) ?? "";
    state = { map, head, row, zoom, hard, calculator };
    for (const [old, name] of Object.entries(OLD)) rest[name] ??= rest[old];
    set(gone ? {} : rest);
    part("settings").open = Object.keys(changes()).length > 0;
    translate();
    if (gone || (form.streams && !input(main().name).value)) greet();
    else ask().then(() => answer && shown && searches(form) && lookAt(answer));
    if (gone) complain(new Error(say("gone", { model: id })));
  }

  async function copy() {
    remember();
    try {
      await navigator.clipboard.writeText(location.href);
    } catch {
      const field = make("textarea", { class: "unseen", readonly: true }, location.href);
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
    }
    part("copy").textContent = say("copied");
    Regard.announce(say("copied"));
    setTimeout(() => { part("copy").textContent = say("copy"); }, 1500);
  }

  // --- events -------------------------------------------------------------------------------------------------------

  /** Ask when the person pauses. */
  function later() {
    clearTimeout(timer);
    if (models && part("live").checked && !form.streams) timer = setTimeout(ask, DELAY);
  }

  function listen() {
    const choose = () => {
      clearTimeout(timer);
      asking?.abort();
      looking?.abort();
      state = {};
      chosen = null;
      build();
      set();
      describe();
      complain(null);
      if (!form.streams) return ask();
      greet();
      return remember();
    };
    part("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
    const urged = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey);
    part("ask").addEventListener("keydown", (event) => urged(event) && ask());
    part("key").addEventListener("change", () => (models ? ask() : start()));
    part("model").addEventListener("change", choose);
    part("reset").addEventListener("click", () => { set(); if (!form.streams) ask(); });
    part("copy").addEventListener("click", copy);
    part("skip").addEventListener("click", (event) => { event.preventDefault(); part("view").focus(); });
    addEventListener("hashchange", restore);
  }

  /** Ask for the runs, then do what the address says. */
  async function start() {
    try {
      models = (await call("v1/models")).data;
      complain(null);
    } catch (error) {
      return complain(error);
    }
    const early = Object.fromEntries(Object.entries(worded()).filter(([, value]) => value));
    if (Object.keys(early).length) link.write({ ...link.read(), ...early });
    part("model").replaceChildren(...models.map(({ id }) => make("option", { value: id }, id)));
    return restore();
  }

  Regard.speak(Regard.preferred());
  Regard.bar(part("bar"), () => {
    translate();
    if (shown || !part("view").querySelector(".written")) draw();
    remember();
  });
  build();
  listen();
  translate();
  greet();
  start();
})();
