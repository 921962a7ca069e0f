// The words of figures, which the server hands out with the session.

import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Session, Words } from "./api";

const Context = createContext<Session["words"] | null>(null);

export const WordsProvider = Context.Provider;

/** Returns the words of a table's figures by key. */
export function useWords(table: keyof Session["words"]): (key: string) => Words {
  const words = useContext(Context)?.[table] ?? {};
  return (key) => {
    const found = words[key];
    if (!found) throw new Error(`no words for the figure ${key} of ${table}`);
    return found;
  };
}

/** The sentences that the pointer brings up over a figure's name. */
export function explained(words: Words): string {
  return `${words.meaning} ${words.advice}`;
}

/** The name of a figure of a step as a heading, with its sentences. */
export function FigureHead({ of }: { of: string }) {
  const words = useWords("step")(of);
  return <h3 title={explained(words)}>{words.name}</h3>;
}
