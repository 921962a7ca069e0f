// Sampled tokens, coloured by what the store holds of them: by token the logprob and the version, by
// turn what a step made of it. What the store does not hold is said, not estimated.

import { useEffect, useRef, useState } from "preact/hooks";
import { ask, ofRun, type Tokens as TokenAnswer, type Turn } from "../api";
import { Loading, number, Problem } from "../parts";
import { visible } from "../texts";

export type Colouring = "none" | "logprob" | "version" | "advantage" | "ratio" | "masked" | "entropy";

export const COLOURS: [Colouring, string][] = [
  ["none", "nothing"],
  ["logprob", "logprob"],
  ["version", "policy version"],
  ["advantage", "advantage (of the turn)"],
  ["ratio", "importance ratio (mean of the turn)"],
  ["masked", "masked (of the turn)"],
  ["entropy", "entropy"],
];

const LEGENDS: Record<Colouring, string> = {
  none: "",
  logprob: "dark: the sampler thought the token unlikely (−5 and less)",
  version: "one colour a version",
  advantage: "orange: worse than the group, blue: better; the turn's, as a step used it",
  ratio: "grey: 1; orange: the trainer finds the turn less likely, blue: more likely; kept by turn, not by token",
  masked: "orange: turns of which a step left tokens out; which of the turn's tokens is not kept",
  entropy: "not kept: a run stores no entropies of single tokens; the step page has the mean",
};
const SHADES = 6;

export function TokenLegend({ colouring }: { colouring: Colouring }) {
  return <span class="quiet">{LEGENDS[colouring]}</span>;
}

function shade(value: number): number {
  return Math.round(Math.min(1, Math.max(0, value)) * SHADES);
}

function signed(value: number): string {
  if (Math.abs(value) < 1e-9) return "";
  return `${value < 0 ? "worse" : "better"}-${shade(Math.abs(value))}`;
}

function classOf(turn: Turn, found: TokenAnswer, at: number, colouring: Colouring): string {
  const last = turn.trainings[turn.trainings.length - 1];
  switch (colouring) {
    case "logprob":
      return `unlikely-${shade(-(found.logprobs[at] ?? 0) / 5)}`;
    case "version":
      return `version-${(found.versions[at] ?? 0) % 8}`;
    case "advantage":
      return last?.advantage == null ? "" : signed(last.advantage / 2);
    case "ratio":
      return last?.ratio ? signed(Math.log(Math.max(last.ratio.mean, 1e-6)) / 0.5) : "";
    case "masked": {
      const num = Object.values(last?.masked ?? {}).reduce((sum, count) => sum + count, 0);
      return num ? `worse-${shade(num / Math.max(1, last?.num_tokens ?? 1))}` : "";
    }
    default:
      return "";
  }
}

/** The tokens of a turn while it is near the window: a record may have a hundred thousand. */
export function Tokens(props: { run: string; turn: Turn; colouring: Colouring }) {
  const [near, setNear] = useState(false);
  const place = useRef<HTMLDivElement>(null);
  // At first about as high as its tokens will be, so that the page keeps its length.
  const height = useRef(Math.min(400, 20 + props.turn.num_output / 5));
  const pages = useState<TokenAnswer[]>([]);
  useEffect(() => {
    const found = place.current;
    if (!found) return;
    const observer = new IntersectionObserver(
      (seen) => {
        const isNear = seen[seen.length - 1]?.isIntersecting ?? false;
        if (!isNear && found.offsetHeight) height.current = found.offsetHeight;
        setNear(isNear);
      },
      { rootMargin: "800px" },
    );
    observer.observe(found);
    return () => observer.disconnect();
  }, []);
  return (
    <div ref={place} style={near ? undefined : { height: `${height.current}px` }}>
      {near && <NearTokens {...props} pages={pages} />}
    </div>
  );
}

type Pages = [TokenAnswer[], (change: (old: TokenAnswer[]) => TokenAnswer[]) => void];

function NearTokens(props: { run: string; turn: Turn; colouring: Colouring; pages: Pages }) {
  const { run, turn, colouring } = props;
  const [pages, setPages] = props.pages;
  const [error, setError] = useState<string | null>(null);
  const num = pages.reduce((sum, page) => sum + page.ids.length, 0);
  const load = (start: number) =>
    ask<TokenAnswer>(ofRun(run, "tokens", { turn: turn.id, start })).then(
      (page) => setPages((old) => [...old.filter((one) => one.start < start), page]),
      (problem: Error) => setError(problem.message),
    );
  useEffect(() => {
    if (!pages.length) void load(0);
  }, []);
  const last = turn.trainings[turn.trainings.length - 1];
  const facts = last
    ? [
        last.advantage === null ? "" : `advantage ${number(last.advantage)}`,
        last.ratio ? `ratio of the turn ${number(last.ratio.mean)}` : "",
        ...Object.entries(last.masked).map(([why, count]) => `${count} of the turn masked: ${why}`),
      ].filter(Boolean).join(", ")
    : "not trained";
  if (error) return <Problem text={error} />;
  if (!pages.length) return <Loading />;
  return (
    <>
      <pre class="text tokens" dir="ltr" tabIndex={0} role="region" aria-label="Sampled tokens">
        {pages.flatMap((page) =>
          page.ids.map((id, at) => (
            <span
              key={page.start + at}
              class={`token ${classOf(turn, page, at, colouring)}`}
              title={`token ${page.start + at}, id ${id}, logprob ${page.logprobs[at]}, version ${page.versions[at]}; ${facts}`}
            >
              {page.texts ? visible(page.texts[at] ?? "") : `${id} `}
            </span>
          )),
        )}
      </pre>
      {pages.some((page) => page.texts === null) && (
        <p class="quiet">The run's tokenizer is not on this machine: ids are shown.</p>
      )}
      {num < turn.num_output && (
        <p class="more">
          {number(num)} of {number(turn.num_output)} tokens. <button type="button" onClick={() => load(num)}>Show more</button>
        </p>
      )}
    </>
  );
}
