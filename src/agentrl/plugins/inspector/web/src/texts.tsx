// Texts of models, tools and judges. They are shown literally: never as markup, and unable to
// reorder or hide the text next to them.

import { diffWordsWithSpace } from "diff";
import bash from "highlight.js/lib/languages/bash";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import { createLowlight } from "lowlight";
import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";
import { ask, type CutText, ofRun } from "./api";
import { Problem } from "./parts";

const lowlight = createLowlight({ json, python, bash });
const HIGHLIGHTED_CHARS = 20_000;
const DIFFED_CHARS = 20_000;

// Control characters, characters that reorder text, and characters without width. Joiners are
// excluded because some scripts and emoji need them.
const INVISIBLE =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/;
const EACH_INVISIBLE = new RegExp(`(${INVISIBLE.source})`, "g");

/** Text with every invisible character made visible. */
export function visible(text: string): ComponentChildren {
  if (!INVISIBLE.test(text)) return text;
  return text.split(EACH_INVISIBLE).map((part, at) => {
    if (at % 2 === 0) return part;
    const code = part.charCodeAt(0);
    const name = code === 27 ? "ESC" : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
    return (
      <span key={at} class="control" title={`the character ${name}`}>
        {name}
      </span>
    );
  });
}

type Leaf = { type: string; value?: string; properties?: { className?: string[] }; children?: Leaf[] };

function coloured(node: Leaf, key: number): ComponentChildren {
  if (node.type === "text") return visible(node.value ?? "");
  const children = (node.children ?? []).map(coloured);
  return (
    <span key={key} class={(node.properties?.className ?? []).join(" ")}>
      {children}
    </span>
  );
}

function language(text: string): "json" | "bash" | "python" | null {
  const start = text.trimStart();
  if (start.startsWith("{") || start.startsWith("[")) return "json";
  if (start.startsWith("$ ")) return "bash";
  if (/^(import |from \w+ import |def |class |Traceback )/.test(start)) return "python";
  return null;
}

/** A text in a fixed-width block; short texts are highlighted by their language. */
export function Block({ text, plain, label }: { text: string; plain?: boolean; label?: string }) {
  const content = useMemo(() => {
    const kind = plain || text.length > HIGHLIGHTED_CHARS ? null : language(text);
    if (!kind) return visible(text);
    return (lowlight.highlight(kind, text) as unknown as Leaf).children?.map(coloured);
  }, [text, plain]);
  return (
    <pre class="text" dir="ltr" tabIndex={0} role="region" aria-label={label ?? "Text"}>
      {content}
    </pre>
  );
}

/** A text that may be cut, with a button that loads the rest. */
export function LongText(props: {
  run: string;
  turn?: string;
  text: CutText | null;
  /** Characters of the turn's text that precede this one. */
  before?: number;
  plain?: boolean;
  label?: string;
}) {
  const { text, run, turn, before = 0 } = props;
  const [more, setMore] = useState("");
  const [error, setError] = useState<string | null>(null);
  const [busy, setBusy] = useState(false);
  if (!text) return null;
  const whole = text.text + more;
  // JavaScript counts UTF-16 units; the server counts characters.
  const num = Array.from(whole).length;
  const load = async () => {
    setBusy(true);
    try {
      const url = ofRun(run, "text", { turn, part: text.part, start: before + num });
      const next = await ask<{ text: string }>(url);
      setMore(more + next.text);
      setError(null);
    } catch (problem) {
      setError((problem as Error).message);
    }
    setBusy(false);
  };
  return (
    <>
      <Block text={whole} plain={props.plain} label={props.label} />
      {num < text.length && (
        <p class="more">
          <span>
            {num.toLocaleString("en")} of {text.length.toLocaleString("en")} characters.
          </span>{" "}
          {text.part && turn && (
            <button type="button" onClick={load} disabled={busy}>
              {busy ? "Loading…" : "Show more"}
            </button>
          )}
        </p>
      )}
      {error && <Problem text={error} />}
    </>
  );
}

const THINK = /^\s*(?:<think>)?([\s\S]*?)<\/think>/;

/** A model's output: the thinking is folded, the rest is shown in full. */
export function ModelText(props: { run: string; turn: string; text: CutText }) {
  const found = THINK.exec(props.text.text);
  if (!found) {
    return <LongText run={props.run} turn={props.turn} text={props.text} label="Model output" />;
  }
  const rest = props.text.text.slice(found[0].length).replace(/^\n+/, "");
  const shown = Array.from(props.text.text).length;
  const before = shown - Array.from(rest).length;
  const said = { ...props.text, text: rest, length: props.text.length - before };
  return (
    <>
      <details class="fold">
        <summary>Thinking ({(found[1] ?? "").length.toLocaleString("en")} characters)</summary>
        <Block text={(found[1] ?? "").trim()} plain label="Thinking" />
      </details>
      <LongText run={props.run} turn={props.turn} text={said} before={before} label="Model output" />
    </>
  );
}

/** Two texts with the differing words marked. */
export function Difference({ from, to, label }: { from: string; to: string; label: string }) {
  return <Compared from={from} to={to} label={label} sides={["from", "to"]} />;
}

/** One of two texts, with the words marked that the other one lacks. */
export function Side(props: { from: string; to: string; side: "from" | "to"; label: string }) {
  return <Compared {...props} sides={[props.side]} />;
}

function Compared({ from, to, label, sides }: { from: string; to: string; label: string; sides: string[] }) {
  const parts = useMemo(
    () => diffWordsWithSpace(from.slice(0, DIFFED_CHARS), to.slice(0, DIFFED_CHARS)),
    [from, to],
  );
  return (
    <pre class="text" dir="ltr" tabIndex={0} role="region" aria-label={label}>
      {parts.map((part, at) => {
        const text = visible(part.value);
        if (part.added) return sides.includes("to") && <ins key={at}>{text}</ins>;
        if (part.removed) return sides.includes("from") && <del key={at}>{text}</del>;
        return <span key={at}>{text}</span>;
      })}
    </pre>
  );
}

/** The text around the first occurrence of any of the words, with all occurrences marked. */
export function Excerpt({ text, words }: { text: string; words: string[] }) {
  const folded = text.toLowerCase();
  const places = words.map((word) => folded.indexOf(word)).filter((at) => at >= 0);
  const start = Math.max(0, (places.length ? Math.min(...places) : 0) - 60);
  const shown = text.slice(start, start + 260);
  const escaped = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const pieces = escaped.length ? shown.split(new RegExp(`(${escaped.join("|")})`, "gi")) : [shown];
  return (
    <span class="excerpt" dir="ltr">
      {start > 0 && "…"}
      {pieces.map((piece, at) =>
        at % 2 ? <mark key={at}>{visible(piece)}</mark> : <span key={at}>{visible(piece)}</span>,
      )}
      {start + 260 < text.length && "…"}
    </span>
  );
}
