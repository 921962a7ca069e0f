// Sampled tokens, coloured by stored values: the sampler's logprob and version, and values of the last
// step that used them (ratio, entropy, reason for masking, the turn's advantage).

import { useEffect, useRef, useState } from "preact/hooks";
import { ask, ofRun, type Tokens as TokenAnswer, type Turn } from "../api";
import { Loading, number, Problem } from "../parts";
import { visible } from "../texts";

export type Colouring = "none" | "logprob" | "version" | "advantage" | "ratio" | "masked" | "entropy";

export const COLOURS: [Colouring, string][] = [
  ["none", "nothing"],
  ["logprob", "logprob"],
  ["version", "policy version"],
  ["advantage", "advantage"],
  ["ratio", "ratio of policy and behavior"],
  ["entropy", "entropy"],
  ["masked", "masking"],
];

const LEGENDS: Record<Colouring, string> = {
  none: "",
  logprob: "dark: the token was unlikely for the sampler (logprob of −5 or less)",
  version: "one color per version",
  advantage: "orange: worse than the group, blue: better; value of the last step that used the turn",
  ratio: "plain: 1; orange: the token is less likely for the trainer than for the sampler, blue: more likely",
  entropy: "dark: high entropy (2 nats or more)",
  masked: "orange: the step left the token out; blue: its gradient was clipped; the tooltip shows the reason",
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

/** The use of a token. If a step left out a whole turn, the turn holds the reason. */
function useOf(last: Turn["trainings"][number] | undefined, found: TokenAnswer, at: number): string {
  if (last && last.num_trained_tokens === 0) return Object.keys(last.masked)[0] ?? "";
  return found.trained?.uses[at] ?? "";
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
      return found.trained ? signed(Math.log(Math.max(found.trained.ratios[at] ?? 1, 1e-6)) / 0.5) : "";
    case "entropy":
      return found.trained?.entropies ? `unlikely-${shade((found.trained.entropies[at] ?? 0) / 2)}` : "";
    case "masked": {
      const use = useOf(last, found, at);
      return use === "trained" || use === "" ? "" : use === "clipped" ? "better-6" : `worse-${SHADES}`;
    }
    default:
      return "";
  }
}

/** The tokens of a turn, drawn only near the window because a record may have a hundred thousand. */
export function Tokens(props: { run: string; turn: Turn; colouring: Colouring }) {
  const [near, setNear] = useState(false);
  const place = useRef<HTMLDivElement>(null);
  // The initial height estimates that of the tokens, so that the page keeps its length.
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
  const facts = (page: TokenAnswer, at: number) => {
    if (!last) return "not trained";
    const { ratios, entropies } = page.trained ?? { ratios: [], entropies: null };
    return [
      last.advantage === null ? "" : `advantage ${number(last.advantage)}`,
      ratios[at] === undefined ? "" : `ratio ${number(ratios[at])}`,
      entropies ? `entropy ${number(entropies[at])}` : "",
      useOf(last, page, at).replace(/_/g, " "),
    ].filter(Boolean).join(", ");
  };
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
              title={`token ${page.start + at}, id ${id}, logprob ${page.logprobs[at]}, version ${page.versions[at]}; ${facts(page, at)}`}
            >
              {page.texts ? visible(page.texts[at] ?? "") : `${id} `}
            </span>
          )),
        )}
      </pre>
      {pages.some((page) => page.texts === null) && (
        <p class="quiet">The run's tokenizer is not on this machine; token ids are shown instead.</p>
      )}
      {num < turn.num_output && (
        <p class="more">
          {number(num)} of {number(turn.num_output)} tokens. <button type="button" onClick={() => load(num)}>Show more</button>
        </p>
      )}
    </>
  );
}
