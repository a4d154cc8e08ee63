import { h, bytes } from "./kit.js";
import { mod, VARIANTS, finished, letter, sentOut, terms } from "./collective.js";
// What a frame says in words: one sentence to read, the price so far, and everything for readers who only listen.
const list = words => (words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`);
const content = (held, chunk, ranks) => terms(held, chunk, ranks).join("+");

/** "GPU0 sent A2 to GPU1": what one transfer carried. */
const carried = ({ before, schedule: { ranks } }, [, src, dst, chunk]) =>
  `GPU${src} sent ${content(before[src][chunk], chunk, ranks)} to GPU${dst}`;

const owners = ({ owned, schedule: { ranks } }) => owned.map((row, r) => {
  const full = row.flatMap((held, chunk) => (finished(held, ranks) ? [`SUM${chunk + 1}`] : []));
  return full.length ? `GPU${r} owns ${list(full)}` : null;
}).filter(Boolean);

/** The end of reduce-scatter, by variant: what to compare with the article. */
function verdict(view) {
  const { variant, schedule: { ranks, reduce_steps }, held } = view, most = owners(view).slice(0, 4);
  const who = `${most.join(", ")}${ranks > 4 ? ", and so on" : ""}.`;
  const missing = Array.from({ length: ranks }, (_, r) => r).filter(r => !held[0][0].includes(r)).map(r => `${letter(r)}1`);
  const hops = `${reduce_steps} step${reduce_steps === 1 ? "" : "s"}`;
  if (variant === "article" && missing.length)
    return { alarm: `Here the article’s picture breaks (claim C21). It shows the full SUM1 on GPU0 after ${hops}. But slot 1 of GPU0 holds only `
      + `${content(held[0][0], 0, ranks)}: ${list(missing)} ${missing.length > 1 ? "are" : "is"} missing, and no reduce step is left. The true owners: ${who}` };
  if (variant === "article")
    return { text: `With two ranks the article’s picture holds, by luck: the next chunk and the previous one are the same. Take three ranks and it breaks. ${who}` };
  if (ranks === 2 && variant !== "textbook") return { text: `${who} With two ranks this ring and the article’s are one and the same.` };
  if (variant === "textbook") return { text: `Each rank now owns one full sum: ${who} The chunk’s number is one ahead of the article’s picture.` };
  if (variant === "nccl") return { text: `${who} This is the article’s end state, reached from another start: GPU0 first sent A${ranks}, not A2.` };
  return { text: `${who} This is the article’s first chunk (A2) and its end state, but the ring runs the other way: GPU0 sends to GPU${ranks - 1}.` };
}

function story(view) {
  const { schedule, variant, step, sent, held, before } = view, { ranks, chunks, steps, reduce_steps } = schedule;
  if (step === 0) {
    const rule = variant && `GPU0 will first send A${mod(VARIANTS[variant].first, ranks) + 1} to GPU${mod(VARIANTS[variant].direction, ranks)}. `;
    return { text: `Each rank holds its own gradient${chunks > 1 ? `, cut into ${chunks} chunks` : ""}: the letter names the rank, the digit the chunk. ${rule || ""}Nothing has moved yet.` };
  }
  const some = words => list(words.length > 4 ? [...words.slice(0, 3), `${words.length - 3} more`] : words);
  const load = ([, src, , chunk]) => content(before[src][chunk], chunk, ranks);
  const out = sent.filter(t => t[1] === 0), into = sent.filter(t => t[2] === 0), said = [];
  if (out.length) said.push(`GPU0 sent ${some(out.map(t => `${load(t)} to GPU${t[2]}`))}.`);
  if (into.length) {
    const slots = new Set(into.map(t => t[3])), [chunk] = slots, them = into.length > 1 ? "them" : "it";
    const now = slots.size > 1 ? "" : `: its chunk ${chunk + 1} is now ${content(held[0][chunk], chunk, ranks)}`;
    said.push(`${out.length ? "It" : "GPU0"} got ${some(into.map(t => `${load(t)} from GPU${t[1]}`))}${into[0][4] ? ` and added ${them}${now}` : into.length > 1 ? ", copies" : ", a copy"}.`);
  }
  if (!sent.length) said.push("Nothing moves in this step.");
  else if (!said.length) said.push(`${carried(view, sent[0])}${sent.length > 1 ? `; ${sent.length - 1} more transfer${sent.length > 2 ? "s" : ""} in this step` : ""}.`);
  const close = step === reduce_steps && variant ? verdict(view) : {};
  if (step === steps) said.push(held.every(row => row.every(cell => finished(cell, ranks))) ? "Every rank now holds every sum." : "The schedule ends here, and some sums are incomplete.");
  if (variant === "article" && step === reduce_steps + 1 && ranks > 2) said.push("The all-gather starts from the true owners (★), not from the article’s (claim C24).");
  return { text: [...said, close.text].filter(Boolean).join(" "), alarm: close.alarm };
}

// A number and its unit stay on one line.
const amount = count => bytes(count).replace(" ", "\u00a0");

function price({ schedule, variant, step, part, counts }) {
  const { ranks, chunks, steps } = schedule, all = counts.reduce((a, b) => a + b, 0), most = Math.max(...counts);
  const strong = count => h("b", {}, amount(count * part));
  if (variant)
    return [`Sent by each rank: ${step} × S/${ranks} = `, strong(step), `. By all: `, strong(all), `. At the end each will have sent 2(N − 1) × S/N = ${steps} × ${amount(part)} = ${amount(steps * part)}.`];
  if (schedule.ranks_per_host) {
    const out = sentOut(schedule, step), busiest = Math.max(...out);
    return [`A chunk is S/${chunks} = ${amount(part)}. Sent so far by all ranks together: `, strong(all), "; out of the host that has sent most: ", strong(busiest), ` (${+(busiest / chunks).toFixed(2)} × S).`];
  }
  const unit = chunks > 1 ? `A chunk is S/${chunks} = ${amount(part)}. ` : "Each transfer carries all of S. ";
  return [`${unit}Sent so far by all ranks together: `, strong(all), "; by the rank that has sent most: ", strong(most), ` (${+(most / chunks).toFixed(2)} × S).`];
}

export function notes(view, phase) {
  const { schedule, step, sent, counts, part } = view, told = story(view);
  const same = counts.every(count => count === counts[0]);
  const full = [
    `Step ${step} of ${schedule.steps}, ${phase}.`,
    sent.length ? `${sent.map(t => carried(view, t)).join("; ")}.` : told.text,
    same ? `Each rank has sent ${bytes(counts[0] * part)} so far.` : "",
    step === schedule.reduce_steps ? `${owners(view).join(", ")}.` : "",
    told.alarm || "",
  ].filter(Boolean).join(" ");
  return { ...told, cost: price(view), full };
}
