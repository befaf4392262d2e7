// Pictures that an agent saw, at their places in texts.

import { pictureSource } from "./api.js";
import { Text } from "./parts.js";
import { createContext, html, useContext } from "./vendor/preact-htm.js";

/** Where a picture is, in texts of RAGEN's own; environments cannot write it. */
export const PLACE = "\ufdd1";

/** The run that a page is about. */
export const Run = createContext(null);

/** What is said where a picture cannot be seen. */
export const ALT = "a picture that the agent saw";

function Picture({ hash }) {
  return html`<img class="picture" alt=${ALT} src=${pictureSource(useContext(Run), hash)} />`;
}

/** Texts one after the other, `render(text, i)` each; `pictures` are those of all their places. */
export function inTurn(texts, pictures, render, limit) {
  let begin = 0;
  return texts.map((text, i) => {
    const end = begin + text.split(PLACE).length - 1;
    const its = pictures.slice(begin, end);
    begin = end;
    return render(html`<${Seen} text=${text} pictures=${its} limit=${limit} />`, i);
  });
}

/** A text with pictures at its places; without pictures, the text alone. */
export function Seen({ text, pictures, limit }) {
  if (!pictures?.length) return html`<${Text} text=${text} limit=${limit} />`;
  return text.split(PLACE).map((part, i) => html`${i > 0 && html`<${Picture} hash=${pictures[i - 1]} />`
    }${part && html`<${Text} text=${part} limit=${limit} />`}`);
}
