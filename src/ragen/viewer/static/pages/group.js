// A group: the episodes of one prompt side by side, and whether the filter kept them.

import { link, visit } from "../addresses.js";
import { useApi } from "../api.js";
import { HORIZONTAL, useRowKeys } from "../keys.js";
import { known, number } from "../numbers.js";
import { Notation } from "../notation.js";
import { Figures, Neighbours, Status, Text, useReady } from "../parts.js";
import { SideBySide, Undone } from "../turns.js";
import { html, useState } from "../vendor/preact-htm.js";

export function Page({ params, query }) {
  const { run } = params;
  const { attempt = "0", step, phase = "train", group } = query;
  const answer = useApi("/api/group", { run, attempt, step, phase, group });
  const { data, error } = answer;
  const episodes = data?.episodes ?? [];
  const [selected, setSelected] = useState(0);
  useReady(data !== null || error !== null);
  const other = (number) =>
    known(number) ? link("group", { run }, { attempt, step, phase, group: number }) : undefined;
  const inList = { phase, step_from: step, step_to: step, group };
  useRowKeys("member", {
    count: episodes.length, at: selected, select: setSelected, arrows: HORIZONTAL,
    open: (at) => visit(link("episode", { run, id: episodes[at].id })),
  });
  return html`<main class="page page-group">
    <header class="row headline">
      <div class="roomy"><h1>Group ${group} of step ${step}</h1>
        <p class="muted">${phase}${attempt !== "0" && `, attempt ${attempt}`}${data && html`
          ${" "}<${Undone} ...${data} /> · <${Text} text=${data.episodes[0]?.env ?? ""} />,
          level ${data.level_seed}`}
          ${" "}· <a href=${link("episodes", { run }, inList)}>as a list</a></p></div>
      ${data && html`<${Figures} all=${figuresOf(data)} />`}
      <${Neighbours} of="group" previous=${other(data?.previous)} next=${other(data?.next)} />
    </header>
    <${Status} ...${answer} />
    ${data && html`
      <p class="lead"><${Ruling} group=${data} phase=${phase} /></p>
      <${Notation} episodes=${episodes} />
      <${SideBySide} selected=${selected} columns=${episodes.map((episode) => ({
        title: `member ${episode.member}`, episode, href: link("episode", { run, id: episode.id }),
      }))} />`}
  </main>`;
}

function figuresOf({ episodes, reward_std: std }) {
  const numSolved = episodes.filter(({ success }) => success).length;
  const mean = episodes.reduce((sum, { reward }) => sum + reward, 0) / episodes.length;
  return [
    ["succeeded", `${numSolved} of ${episodes.length}`],
    ["mean reward", number(mean)],
    ["reward std", number(std)],
  ];
}

/** What each score of the filter measures. */
export const SCORES = {
  reward_std: "the spread (std) of its rewards",
  variance: "the variance of its rewards",
};

/** What a rule of the filter keeps, from its number. */
export const RULES = {
  top_k: (value) => value > 1 ? `the ${number(value)} groups with the highest scores are kept`
    : `the ${number(100 * value)} % of the step's groups with the highest scores are kept`,
  top_p: (value) => `groups are kept from the highest score down, up to ${
    number(100 * value)} % of the sum of the scores`,
  reweight: () => "every group is kept, weighted by its reward std",
};

/** In a sentence: kept or dropped, by which rule, with which score. */
function Ruling({ group, phase }) {
  if (phase !== "train") return "Evaluations are not filtered.";
  const { kept, rule, value, score_name: name, group_score: score } = group;
  const told = RULES[rule]?.(value ?? 1) ?? "this run keeps every group";
  const flat = group.include_zero === false ? ", but none with equal rewards throughout" : "";
  return html`<b class=${kept ? "good" : "warn"}>${kept ? "Kept" : "Dropped"} by the filter</b>:
    ${" "}${told}${flat}.${
    score !== null && ` Its score is ${number(score)}: ${SCORES[name] ?? name}.`}${alike(group)}`;
}

/** Why the group has no learning signal, if so; a single episode is compared with none. */
function alike({ episodes, num_played: played, reward_std: std }) {
  const failed = ` ${played ? `Only ${played}` : "None"} of its ${episodes.length} episodes could be
    played to the end.`;
  if (played < 2) return played < episodes.length && failed;
  return std === 0 && " All episodes earned the same reward, so that there is no learning signal.";
}
