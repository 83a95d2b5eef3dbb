/* The studio: choose a run, type, see the answer and what the model looked at. The drawing is view.js's. */
"use strict";

(() => {
  const { say, make, link, words } = Regard;
  Object.assign(words.en, {
    tagline: "what a model looks at while it answers", skip: "Skip to the answer", model: "Run",
    hint: "Ctrl or ⌘ + Enter asks at once.", live: "while typing", settings: "Decoding",
    reset: "As the run has it", "key field": "API key", copy: "Copy link", copied: "Copied",
    looking: "What the model looked at",
    beam: "Beam", length_penalty: "Length penalty", no_repeat: "No repeat of n-grams of size", best: "Answers",
    sample: "Sample", temperature: "Temperature", top_k: "Top k", top_p: "Top p", seed: "Seed", off: "off",
    empty: "Type something, and the answer appears here. Touch a word of it to see what it looked at.",
    "bad key": "A key has plain letters, digits and signs only.",
    gone: "{model} is not served here. Choose a run, then ask.",
    "status 401": "This server wants an API key.", "status 429": "Too many texts wait already. Ask again in a moment.",
    "status 503": "The server is stopping, or too busy to answer in time.",
    nobody: "The server does not answer. Is it still running?", strange: "The server answered {status}.",
    changed: "The answer has changed meanwhile; ask again.", longest: "at most {count} tokens",
    none: "This server has no run to ask.", stop: "Stop", max_tokens: "Tokens at most", question: "Question",
    "translate text": "Text", "classify text": "Text", "continue text": "Beginning", "answer text": "Context",
    "embed text": "Text", "translate submit": "Answer", "classify submit": "Classify", "continue submit": "Continue",
    "answer submit": "Answer", "embed submit": "Look", writing: "Continuation", random: "random",
    "continue empty": "Type a beginning, and the model goes on, token by token. Then see what each token looked at.",
    "classify empty": "Type something to see how likely each class is, and what each class looked at.",
    "answer empty": "Ask a question about a text: the answer, and where the question looked, appear here.",
  });
  Object.assign(words.ko, {
    tagline: "모델이 답하면서 바라보는 곳", skip: "답으로 건너뛰기", model: "모델",
    hint: "Ctrl 또는 ⌘ + Enter를 누르면 바로 답합니다.", live: "입력하는 동안", settings: "디코딩 설정", reset: "기본값으로",
    "key field": "API 키", copy: "링크 복사", copied: "복사했습니다", looking: "모델이 본 것",
    beam: "빔 크기", length_penalty: "길이 벌점", no_repeat: "반복하지 않을 n-그램 크기", best: "답의 수", sample: "샘플링",
    temperature: "온도", top_k: "상위 k", top_p: "상위 p", seed: "시드", off: "끔",
    empty: "무엇이든 입력하면 여기에 답이 나옵니다. 답의 단어를 가리키거나 누르면 그 단어가 어디를 보았는지 나타납니다.",
    "bad key": "API 키에는 영문자, 숫자, 기호만 쓸 수 있습니다.", gone: "{model} 모델은 이 서버에 없습니다. 다른 모델을 고른 뒤 물어보세요.",
    "status 401": "이 서버를 쓰려면 API 키가 필요합니다.", "status 429": "기다리는 텍스트가 너무 많습니다. 잠시 뒤에 다시 물어보세요.",
    "status 503": "서버가 멈추는 중이거나 너무 바빠서 제때 답하지 못합니다.",
    nobody: "서버가 응답하지 않습니다. 아직 실행 중인가요?", strange: "서버가 {status}(으)로 답했습니다.",
    changed: "그사이 답이 바뀌었습니다. 다시 물어보세요.", longest: "최대 {count}토큰", none: "이 서버에는 물어볼 모델이 없습니다.",
    stop: "멈추기", max_tokens: "최대 토큰 수", question: "질문",
    "translate text": "텍스트", "classify text": "텍스트", "continue text": "첫머리", "answer text": "지문", "embed text": "텍스트",
    "translate submit": "답하기", "classify submit": "분류하기", "continue submit": "이어 쓰기", "answer submit": "답하기",
    "embed submit": "들여다보기", writing: "이어 쓴 글", random: "무작위",
    "continue empty": "첫머리를 입력하면 모델이 토큰을 하나씩 이어 씁니다. 그다음 토큰마다 본 곳을 볼 수 있습니다.",
    "classify empty": "무엇이든 입력하면 클래스마다 확률과 본 곳이 나옵니다.",
    "answer empty": "글에 대해 질문하면 여기에 답과 질문이 본 곳이 나옵니다.",
  });

  const part = (id) => document.getElementById(id);
  const FIELDS = {
    beam: { min: 1, max: 64, step: 1 }, length_penalty: { min: 0, max: 10, step: 0.1 },
    no_repeat: { min: 0, max: 32, step: 1 }, best: { min: 1, max: 10, step: 1 },
    sample: { type: "checkbox" }, temperature: { min: 0, step: 0.05 }, top_k: { min: 1, step: 1 },
    top_p: { min: 0.01, max: 1, step: 0.01 }, max_tokens: { min: 1, step: 1 }, seed: { min: 0, step: 1 },
  };
  /** Which of them count for a task; of others, none. */
  const OF_TASK = {
    translate: Object.keys(FIELDS).filter((name) => name !== "max_tokens"),
    continue: ["temperature", "top_p", "max_tokens", "seed"],
  };
  const SAMPLING = ["temperature", "top_k", "top_p", "seed"], SEARCHING = ["beam", "length_penalty"];
  const DELAY = 350, BEST = 3;
  /** What stands for an emptied field of a run that has a number there. */
  const OFF = { top_k: 1e6, top_p: 1 };
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
    const { best, ...settings } = changes(), text = part("text").value;
    const asked = { model: part("model").value, packed: true };
    if (task() === "answer") return { ...asked, question: part("question").value, context: text, best: BEST };
    if (task() !== "translate") return { ...asked, text };
    return { ...asked, text, best: best ?? answers(settings.beam), settings };
  };
  const complete = ({ model: name, text, question: asked, context }) =>
    Boolean(name && (text ?? (asked.trim() && context)).trim());

  /** Ask, and show the answer; a question that is overtaken is dropped. */
  async function ask() {
    clearTimeout(timer);
    if (!models) return start();
    asking?.abort();
    looking?.abort();
    const mine = (asking = waiting = new AbortController()), asked = question();
    chosen = null;
    remember();
    if (task() === "continue" ? !asked.model : !complete(asked)) {
      waiting = null;
      complain(null);
      return greet();
    }
    busy(true);
    try {
      if (task() === "continue") await write(asked, mine);
      else await look(asked, mine.signal);
      complain(null);
    } catch (error) {
      if (error.name !== "AbortError") complain(error);
    } finally {
      if (asking === mine) {
        waiting = null;
        busy(false);
      }
    }
  }

  /** What a model looked at, drawn. Of another text, another class or token comes first. */
  async function look(asked, signal, before) {
    const full = state.map ? [state.map] : [], there = shown?.tree.maps.some(({ name }) => name === state.map);
    const vectors = state.calculator && there ? full : [];
    const tree = await call("v1/look", { ...asked, full, vectors }, signal);
    const other = shown && (shown.asked.text !== asked.text || shown.asked.target !== asked.target);
    if (other && ["classify", "continue"].includes(task())) delete state.row;
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
  async function write({ model: name, text: prompt }, mine) {
    const { temperature, top_p: top, max_tokens: most, seed } = { ...defaults(), ...changes() };
    const body = { model: name, prompt, temperature, top_p: top, max_tokens: most, seed, stream: true, logprobs: 0 };
    const line = make("p", { class: "line written", dir: "auto" }, make("span", { class: "prompt" }, prompt));
    const card = make("section", { class: "answer" }, make("h2", {}, say("writing")), line);
    let target = "";
    for await (const { text, logprobs } of chunks(body, mine)) {
      if (!target) {
        shown = null;
        part("view").replaceChildren(card);
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
    shown = null;
    if (!prompt.trim()) return;
    await look({ model: name, text: prompt, target, packed: true }, mine.signal);
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
    const onanswer = task() === "translate" ? lookAt : null;
    state = Regard.view(part("view"), shown.tree, { state, onstate, fetchMap, onanswer }).state;
    remember();
  }

  function greet() {
    shown = null;
    busy(false);
    part("view").replaceChildren(make("p", { class: "empty" },
      say(models?.length === 0 ? "none" : words.en[`${task()} empty`] ? `${task()} empty` : "empty")));
  }

  function busy(on) {
    part("view").setAttribute("aria-busy", on && task() !== "continue");
    part("stop").hidden = true;
  }

  function complain(error) {
    part("error").hidden = !error;
    part("error").textContent = error?.message ?? "";
    part("error").lang = error?.foreign ? "en" : document.documentElement.lang;
    if (error?.status === 401) part("key").focus();
  }

  const model = () => models?.find((other) => other.id === part("model").value);
  const task = () => model()?.task ?? "translate";

  /** Fill every marked element with the words of the language. */
  function translate() {
    for (const element of document.querySelectorAll("[data-word]")) element.textContent = say(element.dataset.word);
    part("view").setAttribute("aria-label", say("looking"));
    for (const label of part("fields").children) {
      label.firstChild.textContent = say(label.dataset.field);
      label.lastChild.placeholder = say(label.dataset.field === "seed" ? "random" : "off");
    }
    describe();
  }

  /** The form that the chosen run wants. */
  function shape() {
    const own = OF_TASK[task()] ?? [];
    for (const element of document.querySelectorAll("[data-task]")) element.hidden = element.dataset.task !== task();
    for (const label of part("fields").children) label.hidden = !own.includes(label.dataset.field);
    part("settings").hidden = !own.length;
    part("live-label").hidden = task() === "continue";
    part("text").rows = task() === "answer" ? 8 : 4;
    part("text-label").textContent = say(`${task()} text`);
    part("submit").textContent = say(`${task()} submit`);
  }

  /** What the chosen run is. */
  function describe() {
    shape();
    const { about, source, target, max_length: longest } = model() ?? {};
    const languages = source && target ? `${source} → ${target}` : null;
    const most = longest && say("longest", { count: longest });
    part("about").textContent = [about, languages, most].filter(Boolean).join(" · ");
  }

  // --- settings -----------------------------------------------------------------------------------------------------

  /** How many answers to ask for: no more than the search keeps anyway, so that asking does not change the first. */
  const answers = (beam) => Math.min(BEST, beam ?? model()?.decode.beam ?? 1);
  const defaults = () => {
    const { decode, max_length: longest } = model() ?? {};
    if (task() !== "continue") return { best: answers(), ...decode };
    const { sample, temperature, top_p: top } = decode;
    return { temperature: sample ? temperature : 0, top_p: top, max_tokens: Math.min(200, Math.ceil(longest / 2)) };
  };
  const field = (name) => part("fields").querySelector(`[name=${name}]`);

  function build() {
    for (const [name, attributes] of Object.entries(FIELDS)) {
      const input = make("input", { name, type: "number", ...attributes, oninput: () => { permit(); later(); } });
      input.addEventListener("change", () => {
        if (input.value === "" && !(name in OFF)) input.value = defaults()[name] ?? "";
      });
      part("fields").append(make("label", { "data-field": name, class: attributes.type && "check" }, "", input));
    }
  }

  /** The value of a field as the server wants it; empty is off. */
  function valueOf(input) {
    if (input.type === "checkbox") return input.checked;
    return input.value === "" ? null : Number(input.value);
  }

  /** The settings that differ from the run's own. */
  function changes() {
    const own = defaults(), all = (OF_TASK[task()] ?? []).map((name) => [name, valueOf(field(name))]);
    const differ = all.filter(([name, value]) => value !== (own[name] ?? null));
    const sent = differ.map(([name, value]) => [name, value ?? OFF[name]]);
    return Object.fromEntries(sent.filter(([, value]) => value != null));
  }

  /** Set the fields to the run's own settings, then to the given ones. */
  function set(values = {}) {
    for (const name of Object.keys(FIELDS)) {
      const value = values[name] ?? defaults()[name];
      if (field(name).type === "checkbox") field(name).checked = String(value) === "true";
      else field(name).value = value ?? "";
    }
    permit();
  }

  /** Only the settings that count can be changed. */
  function permit() {
    for (const name of SAMPLING) field(name).disabled = task() === "translate" && !field("sample").checked;
    for (const name of SEARCHING) field(name).disabled = field("sample").checked;
  }

  // --- links --------------------------------------------------------------------------------------------------------

  /** Keep everything in the address. */
  function remember() {
    const { map, head, row, hard, calculator } = state, { lang: language } = document.documentElement;
    if (!models) return link.write({ ...link.read(), language });
    const asked = task() === "answer" ? part("question").value : null, settings = changes();
    const form = { model: part("model").value, question: asked, text: part("text").value, answer: chosen };
    if (settings.sample === false) settings.sample = "false";
    return link.write({ ...form, ...settings, map, head, row, hard, calculator, language });
  }

  /** Make the page what its address says. */
  function restore() {
    if (!models) return;
    const { model: id, question: asked, text, answer, map, head, row, hard, calculator, ...settings } = link.read();
    const gone = id && models.length && !models.some((other) => other.id === id);
    Regard.speak(Regard.preferred());
    part("language").value = document.documentElement.lang;
    if (models.some((other) => other.id === id)) part("model").value = id;
    part("text").value = text ?? "";
    part("question").value = asked ?? "";
    state = { map, head, row, hard, calculator };
    set(gone ? {} : settings);
    part("settings").open = Object.keys(changes()).length > 0;
    translate();
    if (gone || (task() === "continue" && !text)) greet();
    else ask().then(() => answer && shown && lookAt(answer));
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
    if (models && part("live").checked && task() !== "continue") timer = setTimeout(ask, DELAY);
  }

  function listen() {
    const choose = () => {
      asking?.abort();
      looking?.abort();
      state = {};
      chosen = null;
      set();
      describe();
      complain(null);
      if (task() !== "continue") return ask();
      greet();
      return remember();
    };
    part("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
    const urged = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey);
    part("ask").addEventListener("keydown", (event) => urged(event) && ask());
    part("text").addEventListener("input", later);
    part("question").addEventListener("input", later);
    part("key").addEventListener("change", () => (models ? ask() : start()));
    part("model").addEventListener("change", choose);
    part("reset").addEventListener("click", () => { set(); if (task() !== "continue") ask(); });
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
    const typed = Object.entries({ text: part("text").value, question: part("question").value });
    const kept = Object.fromEntries(typed.filter(([, value]) => value));
    if (Object.keys(kept).length) link.write({ ...link.read(), ...kept });
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
