// What rollouts did: their sizes by step, failures by kind, questions by time, and rollouts in progress.

import { useEffect, useMemo, useState } from "preact/hooks";
import { Link, useLocation, useSearch } from "wouter-preact";
import {
  type Distributions, type FailureKinds, type LiveRollouts, ofRun, type Questions, query, type Session,
  useAsk, useNews,
} from "../api";
import {
  Ago, Field, groupPath, Loading, number, Problem, recordPath, RunHead, runPath, scoreClass, seconds, Section, SplitOptions,
  stepPath,
} from "../parts";
import { Block, visible } from "../texts";
import { ErrorsCard } from "./run";

const BINS = 10;

const SIZES: [keyof Distributions["columns"] & `num_${string}`, string, string][] = [
  ["num_output_tokens", "Lengths", "sampled tokens"],
  ["num_turns", "Turns", "turns"],
  ["num_tool_calls", "Tool calls", "calls"],
  ["num_tool_errors", "Tool errors", "errors"],
];

export function DistributionsPage({ run }: { run: string }) {
  const { tick } = useNews(run);
  const { value, error } = useAsk<Distributions>(ofRun(run, "distributions"), tick);
  const found = value?.columns;
  return (
    <>
      <RunHead run={run} title="Distributions" />
      {error && <Problem text={error} />}
      {!value && !error && <Loading />}
      {value && found && !found.step.length && <p class="quiet">No step has used a rollout yet.</p>}
      {value && found && found.step.length > 0 && (
        <>
          <p class="quiet">
            Up to {value.rollouts_a_step} rollouts of each of {value.steps.length} steps, drawn without regard to their
            length; tool errors of {value.tool_rollouts_a_step} of them. A column is a step; the darker a cell, the
            more of its rollouts are there. A click lists them.
          </p>
          <Histogram run={run} title="Rewards" unit="score" steps={value.steps} found={found} of={found.score} />
          {SIZES.filter(([name]) => found[name].some(Boolean) || name === "num_tool_errors").map(([name, title, unit]) => (
            <Histogram key={name} run={run} title={title} unit={unit} steps={value.steps} found={found} of={found[name]} />
          ))}
          <Outcomes run={run} steps={value.steps} found={found} />
        </>
      )}
    </>
  );
}

interface Bin {
  text: string;
  holds: (value: number) => boolean;
}

/** Bins of equal width over the range, or one per whole number if there are few of them. */
function binsOf(values: number[]): Bin[] {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const whole = values.every(Number.isInteger);
  if (whole && high - low < BINS) {
    return Array.from({ length: high - low + 1 }, (_, at) => ({ text: number(low + at), holds: (value: number) => value === low + at }));
  }
  const width = whole ? Math.ceil((high - low + 1) / BINS) : (high - low) / BINS || 1;
  const num = Math.max(1, Math.ceil((high - low + (whole ? 1 : 0)) / width - 1e-9));
  return Array.from({ length: num }, (_, at) => {
    const [from, to] = [low + at * width, low + (at + 1) * width];
    return {
      text: whole ? `${number(from)}–${number(to - 1)}` : `${number(from, 2)}–${number(to, 2)}`,
      holds: (value: number) => value >= from && (value < to || (at === num - 1 && value <= high)),
    };
  });
}

interface HistogramProps {
  run: string;
  title: string;
  unit: string;
  steps: number[];
  found: Distributions["columns"];
  of: (number | null)[];
}

function Histogram(props: HistogramProps) {
  const { steps, found, of } = props;
  const known = of.filter((value): value is number => value !== null);
  const rows = useMemo(() => {
    if (!known.length) return [];
    return binsOf(known).reverse().map((bin) => ({
      name: bin.text,
      cells: steps.map((step) => found.record_id.filter((_, at) => {
        const value = of[at];
        return found.step[at] === step && value !== null && value !== undefined && bin.holds(value);
      })),
    }));
  }, [of, steps]);
  if (!known.length) return null;
  const mean = (step: number | undefined) => {
    const values = of.filter((value, at) => found.step[at] === step && value !== null) as number[];
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  };
  return (
    <Heat
      {...props}
      rows={rows}
      aside={`mean ${number(mean(steps[0]))} at step ${steps[0]}, ${number(mean(steps[steps.length - 1]))} at step ${steps[steps.length - 1]}; highest ${number(Math.max(...known))} ${props.unit}`}
    />
  );
}

function Outcomes({ run, steps, found }: { run: string; steps: number[]; found: Distributions["columns"] }) {
  const names = [...new Set(found.outcome.map((one) => one ?? "failed"))].sort();
  const rows = names.map((name) => ({
    name: name.replace(/_/g, " "),
    cells: steps.map((step) => found.record_id.filter((_, at) => found.step[at] === step && (found.outcome[at] ?? "failed") === name)),
  }));
  return <Heat run={run} title="Outcomes" steps={steps} rows={rows} aside="how rollouts ended" />;
}

const LISTED = 24;

/** A table with a row per bin and a column per step, shaded by the share of the step's rollouts. */
function Heat(props: { run: string; title: string; steps: number[]; rows: { name: string; cells: string[][] }[]; aside: string }) {
  const { run, steps, rows, title } = props;
  const [chosen, choose] = useState<[number, number] | null>(null);
  const sums = steps.map((_, column) => rows.reduce((sum, row) => sum + (row.cells[column]?.length ?? 0), 0));
  const say = (row: number, column: number) =>
    `step ${steps[column]}, ${rows[row]?.name}: ${rows[row]?.cells[column]?.length ?? 0} of ${sums[column]} rollouts`;
  const ids = chosen ? rows[chosen[0]]?.cells[chosen[1]] ?? [] : [];
  return (
    <Section title={title} aside={<span class="quiet">{props.aside}</span>}>
      <div class="scroll" tabIndex={0} role="region" aria-label={`${title} by step`}>
        <table class="heat">
          <tbody>
            {rows.map((row, at) => (
              <tr key={row.name}>
                <th scope="row">{row.name}</th>
                {row.cells.map((ids, column) => (
                  <td key={steps[column]} title={say(at, column)} onClick={() => choose([at, column])}
                    class={chosen?.[0] === at && chosen[1] === column ? "chosen" : ""}>
                    {ids.length > 0 && (
                      <span class="heat-cell" style={{ opacity: String(0.12 + (0.88 * ids.length) / (sums[column] || 1)) }}>
                        <span class="hidden">{ids.length}</span>
                      </span>
                    )}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
          <tfoot>
            <tr>
              <th scope="row">step</th>
              {steps.map((step, at) => (
                <td key={step} class="heat-step">
                  {at % Math.ceil(steps.length / 12) === 0 && <Link href={stepPath(run, step)}>{step}</Link>}
                </td>
              ))}
            </tr>
          </tfoot>
        </table>
      </div>
      {chosen && (
        <p aria-live="polite">
          <b>{say(...chosen)}</b>{" "}
          {ids.slice(0, LISTED).map((id) => <Link key={id} class="tag" href={recordPath(run, id)}>{id}</Link>)}
          {ids.length > LISTED && <span class="quiet">and {ids.length - LISTED} more</span>}
        </p>
      )}
    </Section>
  );
}

export function FailuresPage({ run, session }: { run: string; session: Session | null }) {
  const { tick } = useNews(run);
  const { value, error } = useAsk<FailureKinds>(ofRun(run, "failures"), tick);
  return (
    <>
      <RunHead run={run} title="Failures" />
      {error && <Problem text={error} />}
      {!value && !error && <Loading />}
      {value && (
        <>
          <Section
            title="Rollouts that failed, by kind"
            aside={<span class="quiet">of {number(value.num_rollouts)} rollouts in the newest {number(value.num_groups)} groups at most</span>}
          >
            {!value.kinds.length && <p class="quiet">None.</p>}
            <ul class="kinds">
              {value.kinds.map((one) => (
                <li key={one.kind}>
                  <p>
                    <b>{one.kind.replace(/_/g, " ")}</b> {number(one.num)} rollouts, {number((100 * one.num) / value.num_rollouts, 1)} %{" "}
                    {KIND_FILTERS[one.kind] && (
                      <Link href={`${runPath(run)}/groups${query(KIND_FILTERS[one.kind] ?? {})}`}>groups with such rollouts</Link>
                    )}
                  </p>
                  {one.record_id && (
                    <>
                      <p>Example: <Link href={recordPath(run, one.record_id)} data-row>{one.record_id}</Link></p>
                      {one.reply && <Block text={one.reply} plain label={`Last reply of the example of ${one.kind.replace(/_/g, " ")}`} />}
                    </>
                  )}
                </li>
              ))}
            </ul>
          </Section>
          <ToolTimes run={run} found={value} />
          <Section
            title="Tool errors, by tool and text"
            aside={<span class="quiet">in the newest {number(value.num_tool_rollouts)} rollouts; numbers and ids count as equal</span>}
          >
            {!value.tools.length && <p class="quiet">None.</p>}
            <ul class="kinds">
              {value.tools.map((one) => (
                <li key={`${one.tool} ${one.text}`}>
                  <p>
                    <b>{one.tool ? visible(one.tool) : "a call that could not be read"}</b> {number(one.num)} ×. Example:{" "}
                    <Link href={recordPath(run, one.record_id, { turn: String(one.turn) })} data-row>{one.record_id}, turn {one.turn}</Link>
                  </p>
                  <Block text={one.text} plain label={`Error of ${one.tool || "a call"}`} />
                </li>
              ))}
            </ul>
          </Section>
        </>
      )}
      <ErrorsCard run={run} tick={tick} may={session?.may_control ?? false} />
    </>
  );
}

/** How long calls took by tool, and how many were errors. */
function ToolTimes({ run, found }: { run: string; found: FailureKinds }) {
  return (
    <Section
      title="Tools"
      aside={<span class="quiet">answered calls in the newest {number(found.num_tool_rollouts)} rollouts; most time in total first</span>}
    >
      {!found.times.length && <p class="quiet">No tool was called.</p>}
      {found.times.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Tools">
          <table>
            <thead>
              <tr>
                <th scope="col">Tool</th><th scope="col" class="num">Calls</th>
                <th scope="col" class="num">Errors</th><th scope="col" class="num">Median</th>
                <th scope="col" class="num">95th percentile</th><th scope="col" class="num">Total</th>
                <th scope="col">Slowest</th>
              </tr>
            </thead>
            <tbody>
              {found.times.map((one) => (
                <tr key={one.tool}>
                  <td><code>{one.tool ? visible(one.tool) : "a call that could not be read"}</code></td>
                  <td class="num">{number(one.num)}</td>
                  <td class="num">{number(one.num_errors)}{one.num_errors > 0 && ` (${number((100 * one.num_errors) / one.num, 1)} %)`}</td>
                  <td class="num">{seconds(one.median)}</td>
                  <td class="num">{seconds(one.p95)}</td>
                  <td class="num">{seconds(one.total)}</td>
                  <td><Link href={recordPath(run, one.slowest.record_id, { turn: String(one.slowest.turn) })}>{seconds(one.slowest.seconds)}</Link></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Section>
  );
}

const KIND_FILTERS: Record<string, Record<string, string>> = {
  "wrong answer": { outcome: "answered", max_score: "0" },
  ...Object.fromEntries(
    ["no_answer", "turns_limit", "length_limit", "time_limit", "tool_calls_limit", "repetition", "agent_error"].map((name) => [name, { outcome: name }]),
  ),
};

export function QuestionsPage({ run }: { run: string }) {
  const given = Object.fromEntries(new URLSearchParams(useSearch())) as Record<string, string>;
  const [, go] = useLocation();
  const { tick } = useNews(run);
  const { value, error } = useAsk<Questions>(ofRun(run, "questions", given), tick);
  const set = (changes: Record<string, string>) =>
    go(`${runPath(run)}/questions${query({ ...given, ...changes })}`, { replace: true });
  const split = given["split"] ?? "train";
  const isTraining = split === "train";
  return (
    <>
      <RunHead run={run} title={isTraining ? "Questions" : "Evaluations"} />
      <form class="row few filters card" onSubmit={(event) => event.preventDefault()}>
        <Field label="Questions">
          <select value={split} onChange={(event) => set({ split: event.currentTarget.value })}>
            <SplitOptions />
          </select>
        </Field>
        <Field label="Solved by">
          <select value={given["kind"] ?? "all"} onChange={(event) => set({ kind: event.currentTarget.value })}>
            <option value="all">any number</option>
            <option value="nobody">nobody</option>
            <option value="some">some rollouts</option>
            <option value="everybody">everybody</option>
          </select>
        </Field>
        <Field label="Order">
          <select value={given["sort"] ?? "low"} onChange={(event) => set({ sort: event.currentTarget.value })}>
            <option value="low">lowest last reward</option>
            <option value="high">highest last reward</option>
            <option value="lost">most forgotten</option>
            <option value="gained">most learned</option>
          </select>
        </Field>
      </form>
      {error && <Problem text={error} />}
      {!value && !error && <Loading />}
      {value && (
        <>
          <p role="status">
            <b>{number(value.num)}</b> questions: <b>{number(value.counts.nobody)}</b> solved by nobody,{" "}
            <b>{number(value.counts.some)}</b> by some rollouts, <b>{number(value.counts.everybody)}</b> by everybody.{" "}
            <span class="quiet">
              Nobody: no score above 0. Everybody: no score below 1.
              {value.is_cut && (isTraining ? " Only the newest part of the run is counted." : " Only the first questions are counted.")}
            </span>
          </p>
          {value.commands.length > 0 && value.num_chosen > 0 && (
            <Section title="What to do with them">
              <ul class="plain">
                {value.commands.map(([sentence, command]) => (
                  <li key={command}>{sentence} <code class="break">{command}</code></li>
                ))}
              </ul>
              <details class="fold">
                <summary>Ids of {value.ids.length < value.num_chosen ? `the first ${number(value.ids.length)}` : "all"} of them</summary>
                <Block text={value.ids.join("\n")} plain label="Ids of the questions" />
              </details>
            </Section>
          )}
          <Section
            title={isTraining ? "Reward by question and epoch" : "Reward by question and version"}
            aside={<span class="quiet">{value.num_chosen > value.rows.length && `the first ${value.rows.length} of ${number(value.num_chosen)}; `}a cell opens the group</span>}
          >
            <Matrix run={run} found={value} isTraining={isTraining} />
          </Section>
        </>
      )}
    </>
  );
}

function Matrix({ run, found, isTraining }: { run: string; found: Questions; isTraining: boolean }) {
  if (!found.rows.length) return <p class="quiet">None.</p>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Reward by question">
      <table>
        <thead>
          <tr>
            <th scope="col">Question</th>
            {found.times.map((time) => <th key={time} scope="col">{isTraining ? "epoch" : "version"} {time}</th>)}
            <th scope="col" class="num">Change</th>
          </tr>
        </thead>
        <tbody>
          {found.rows.map((row) => (
            <tr key={row.question}>
              <th scope="row" class="question" title={row.text}>
                <span class="clip" dir="ltr">{visible(row.text) || row.question}</span> <span class="quiet">{row.question}</span>
              </th>
              {found.times.map((time) => {
                const cell = row.times[String(time)];
                return (
                  <td key={time}>
                    {cell && (
                      <Link class={`cell ${scoreClass(cell.mean)}`} href={groupPath(run, cell.task_id)}
                        aria-label={`${row.question}, ${isTraining ? "epoch" : "version"} ${time}: mean ${number(cell.mean, 2)}`}
                        title={`mean ${number(cell.mean)}, ${number(cell.low)} to ${number(cell.high)}, ${cell.num} rollouts`}>
                        {number(cell.mean, 2)}
                      </Link>
                    )}
                  </td>
                );
              })}
              <td class="num">{Object.keys(row.times).length > 1 ? `${row.change > 0 ? "+" : ""}${number(row.change, 2)}` : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const POLL_MS = 2000;

export function LivePage({ run }: { run: string }) {
  const [tick, setTick] = useState(0);
  const { value, error } = useAsk<LiveRollouts>(ofRun(run, "live"), tick);
  useEffect(() => {
    const timer = window.setInterval(() => !document.hidden && setTick((old) => old + 1), POLL_MS);
    return () => window.clearInterval(timer);
  }, []);
  return (
    <>
      <RunHead run={run} title="Rollouts in progress" />
      <p class="quiet">
        Turn by turn: a turn appears when its model call has ended and is stored. A click follows one rollout.
      </p>
      {error && <Problem text={error} />}
      {!value && !error && <Loading />}
      {value && (
        <Section title={`${value.rollouts.length} rollouts`}>
          {!value.rollouts.length && <p class="quiet">No rollout is in progress.</p>}
          <ul class="kinds">
            {value.rollouts.map((one) => (
              <li key={one.record_id}>
                <p>
                  <Link href={recordPath(run, one.record_id, { follow: "1" })} data-row>{one.record_id}</Link>{" "}
                  <span class="quiet">
                    attempt {one.attempt}, {one.num_turns} turns, started <Ago at={one.started_at} />
                    {one.last_turn_at && <>, last turn <Ago at={one.last_turn_at} /></>}
                  </span>
                </p>
                {(one.said || one.calls.length > 0) && (
                  <p class="clip" dir="ltr">{visible(one.said)} {one.calls.map((name, at) => <code key={at}>{visible(name)}()</code>)}</p>
                )}
              </li>
            ))}
          </ul>
        </Section>
      )}
    </>
  );
}
