// One run: curves, time per phase of its steps, processes, alarms, errors and controls.

import { useEffect, useMemo, useState } from "preact/hooks";
import { Link, useLocation } from "wouter-preact";
import {
  type Curves, type Errors, ofRun, type Overview, query, type RunRow, type Session, tell, useAsk, useNews,
} from "../api";
import { Curve, CurveTools, type Line, type Mark, StepBar, useCurveView } from "../charts";
import {
  Ago, Badge, Bars, Crumbs, type Fact, Facts, Imported, Loading, number, Problem, recordPath, Section, Status,
  stepPath, useTitle,
} from "../parts";
import { explained, FigureHead, useWords } from "../words";
import { Block } from "../texts";
import { Controls } from "./controls";
import { TourCard } from "./tour";

const SHOWN = [
  "reward_mean", "loss", "grad_norm", "entropy", "kl", "sampler_kl_k3",
  "ratio_mean", "ratio_max", "clip_fraction", "tokens_per_second", "max_output_tokens",
  "turns_mean", "learning_rate", "merge_tokens",
];
const MORE = [
  "reward_std", "logprob_gap", "clip_fraction_positive", "clip_fraction_negative", "drop_fraction", "mask_fraction",
  "num_records", "num_trained_records", "num_trained_tokens", "num_output_tokens", "tflops", "mfu",
];
/** Shown of runs whose groups branch; for chains, most of them stand still. */
const OF_BRANCHES = ["credit_spread", "saved_groups", "branch_reuse", "merge_rollouts"];
const MOST_MARKS = 60;
const ENDED = new Set(["completed", "no_signal", "failed"]);

export function RunPage({ run, session }: { run: string; session: Session | null }) {
  useTitle(run);
  const [, go] = useLocation();
  const { tick, live } = useNews(run);
  const overview = useAsk<Overview>(ofRun(run, "overview"), tick);
  const curves = useAsk<Curves>(ofRun(run, "curves"), tick);
  const view = overview.value;
  const steps = curves.value;
  const queueWords = useWords("queue");
  const stepWords = useWords("step");
  const queue = (key: string, value: string): Fact => [queueWords(key).name, value, explained(queueWords(key))];
  if (overview.error && !view) return <><Crumbs run={run} /><h1>{run}</h1><Problem text={overview.error} /></>;
  if (!view) return <Loading />;
  const sum = (name: keyof Curves["totals"]) => steps?.totals[name] ?? {};
  return (
    <>
      <Crumbs run={run} />
      <div class="head">
        <h1>{run}</h1>
        <Status value={view.status} />
        {live && view.is_live && <Badge kind="live">live</Badge>}
        {view.is_imported && <Imported />}
        {view.control.sampling_paused && <Badge kind="warn">sampling paused</Badge>}
      </div>
      {overview.error && <Problem text={overview.error} />}
      {view.alarms.length > 0 && (
        <ul class="alarms" aria-label="Alarms">
          {view.alarms.map((alarm) => (
            <li key={alarm.kind} class={alarm.severity}>
              <b>{alarm.kind}</b> {alarm.text}
            </li>
          ))}
        </ul>
      )}
      {view.control_problems.length > 0 && (
        <ul class="alarms" aria-label="Problems of the controls">
          {view.control_problems.map((text) => <li key={text} class="warning"><b>control left out</b> {text}</li>)}
        </ul>
      )}
      {view.first_answers && <Section title="First answers"><Block text={view.first_answers} plain label="First answers" /></Section>}
      {session?.tour && <TourCard run={run} tour={session.tour} />}
      <Section title="Steps">
        {steps && steps.step.length > 0 ? (
          <StepBar
            steps={steps.recent.step}
            phases={steps.recent.seconds}
            href={(step) => stepPath(run, step)}
            go={(step) => go(stepPath(run, step))}
          />
        ) : (
          <p class="quiet">{curves.error ?? "No step has finished yet, or the run has no figures."}</p>
        )}
      </Section>
      {steps && <Charts run={run} curves={steps} tick={tick} />}
      <div class="columns">
        <Section title="Queue">
          <Facts
            rows={[
              queue("policy_version", number(view.policy_version)),
              queue("num_groups", `${number(view.progress.num_groups_completed)} of ${number(view.progress.num_groups)}`),
              queue("num_groups_consumed", number(view.progress.num_groups_consumed)),
              queue("num_groups_ready", number(view.progress.num_groups_ready)),
              queue("admitted_groups", number(view.admitted_groups)),
              queue("num_output_tokens", number(view.progress.num_output_tokens)),
            ]}
          />
          <h3>Records by state</h3>
          <Bars counts={ENDED.has(view.status) ? withoutQueue(view.progress.records) : view.progress.records} />
        </Section>
        <Section title={stepWords("staleness").name} hint={explained(stepWords("staleness"))}>
          <p class="quiet">{stepWords("staleness").meaning}</p>
          <Bars counts={sum("staleness")} />
        </Section>
        <Section title="Left out">
          <FigureHead of="dropped" />
          <Bars counts={sum("dropped")} />
          <FigureHead of="masked_tokens" />
          <Bars counts={sum("masked_tokens")} />
        </Section>
        {Object.keys(sum("branched_records")).length > 0 && (
          <Section title={stepWords("branched_records").name} hint={explained(stepWords("branched_records"))}>
            <p class="quiet">{stepWords("branched_records").meaning}</p>
            <Bars counts={sum("branched_records")} />
          </Section>
        )}
        <Section title="Reward by tag">
          <p class="quiet">Over the last completed groups.</p>
          <Bars
            counts={Object.fromEntries(
              Object.entries(view.reward_by_tag).map(([tag, { mean, num }]) => [`${tag} (${num})`, mean]),
            )}
          />
        </Section>
      </div>
      <Fleet view={view} />
      <ErrorsCard run={run} tick={tick} may={session?.may_control ?? false} />
      <Controls run={run} view={view} may={session?.may_control ?? false} done={overview.again} />
      <Config run={run} />
    </>
  );
}

/** The records of a run that has ended: what it never needed does not wait any more. */
function withoutQueue({ pending, ...others }: Record<string, number>): Record<string, number> {
  return pending ? { ...others, "not started": pending } : others;
}

/** The lines of one figure, with the band between the ends of what a point stands for. */
export function lineOf(name: string, label: string, curves: Curves): Line {
  return {
    label,
    x: curves.step,
    y: curves.curves[name] ?? curves.step.map(() => null),
    low: curves.lows?.[name],
    high: curves.highs?.[name],
    band: `lowest to highest of ${curves.steps_a_point} steps`,
  };
}

/** The means of a run's evaluations, with the intervals of those that have one. */
export function evaluationLine(label: string, curves: Curves): Line {
  const known = curves.evals.some((one) => one.low !== null);
  return {
    label,
    x: curves.evals.map((one) => one.version),
    y: curves.evals.map((one) => one.reward_mean),
    ...(known && {
      low: curves.evals.map((one) => one.low),
      high: curves.evals.map((one) => one.high),
      band: "95 % interval",
    }),
  };
}

function marksOf(curves: Curves): Mark[] {
  const evals = curves.evals.length > MOST_MARKS ? [] : curves.evals;
  return [
    ...evals.map((one) => ({
      step: one.version, kind: "evaluation" as const, text: `evaluation of version ${one.version}: ${number(one.reward_mean)}`,
    })),
    ...curves.alarms.map((one) => ({ step: one.step, kind: "alarm" as const, text: `${one.kind}: ${one.text}` })),
  ];
}

function Charts({ run, curves, tick }: { run: string; curves: Curves; tick: number }) {
  const [, go] = useLocation();
  const wordsOf = useWords("step");
  const evalWords = useWords("eval")("reward_mean");
  const [view, setView] = useCurveView();
  const [all, showAll] = useState(false);
  const isNear = view.from !== null && view.to !== null && curves.steps_a_point > 1;
  // A range of a thinned run is asked for again, so that it is shown step by step.
  const range = { after: Math.max(0, (view.from ?? 0) - 1), until: view.to };
  const near = useAsk<Curves>(isNear ? ofRun(run, "curves", range) : null, tick);
  const shown = (isNear && near.value) || curves;
  const charts = useMemo(
    () =>
      [...SHOWN, ...(curves.curves["branch_reuse"] ? OF_BRANCHES : []), ...(all ? MORE : [])].filter((name) => curves.curves[name]).map((name) => ({
        words: wordsOf(name),
        lines: [lineOf(name, wordsOf(name).name, shown)],
      })),
    [shown, all],
  );
  const evals = useMemo(() => [evaluationLine(evalWords.name, curves)], [curves]);
  const marks = useMemo(() => marksOf(curves), [curves]);
  const shared = { view, onZoom: (from: number | null, to: number | null) => setView({ from, to }) };
  const open = (step: number) => go(stepPath(run, step));
  if (!charts.length) return null;
  return (
    <Section
      title="Curves"
      aside={<span class="quiet">a click opens the step, a drag zooms in, a double click shows all; step N made version N of the weights</span>}
    >
      <CurveTools view={view} set={setView}>
        <label class="field inline">
          <input type="checkbox" checked={all} onChange={(event) => showAll(event.currentTarget.checked)} />
          <span>More figures</span>
        </label>
        <OtherRuns run={run} />
      </CurveTools>
      <div class="curves">
        {charts.map((chart) => (
          <Curve key={chart.words.name} {...chart} {...shared} marks={marks} onStep={open} />
        ))}
        {curves.evals.length > 0 && (
          <Curve words={evalWords} lines={evals} {...shared} view={{ ...view, smooth: 0 }} each="each evaluation" />
        )}
      </div>
    </Section>
  );
}

/** Leads to this run's curves laid over those of another one. */
function OtherRuns({ run }: { run: string }) {
  const [, go] = useLocation();
  const { value } = useAsk<{ runs: RunRow[] }>("/api/runs");
  const others = value?.runs.filter((one) => one.name !== run) ?? [];
  if (!others.length) return null;
  return (
    <label class="field inline"><span>Lay over</span>
      <select value="" onChange={(event) => go(`/compare${query({ runs: `${run},${event.currentTarget.value}` })}`)}>
        <option value="">another run</option>
        {others.map((one) => <option key={one.name} value={one.name}>{one.name}</option>)}
      </select>
    </label>
  );
}

function Fleet({ view }: { view: Overview }) {
  const { now, services, samplers } = view.fleet;
  return (
    <Section title="Fleet">
      <div class="scroll" tabIndex={0} role="region" aria-label="Fleet">
        <table>
          <thead>
            <tr>
              <th scope="col">Process</th><th scope="col">Status</th><th scope="col">Load</th>
              <th scope="col" class="num">Version</th><th scope="col">Heartbeat</th>
            </tr>
          </thead>
          <tbody>
            {Object.entries(view.trainer_leases).map(([name, lease]) => (
              <tr key={name}>
                <td>{name} <span class="quiet">{lease.owner}</span></td>
                <td>{view.status === "interrupted" ? <Status value="stopped" /> : lease.expires_at > now ? <Status value="training" /> : <Badge kind="plain">{ENDED.has(view.status) ? "ended" : "lease expired"}</Badge>}</td>
                <td /><td class="num">{number(view.policy_version)}</td><td />
              </tr>
            ))}
            {services.map((one) => (
              <tr key={one.id}>
                <td>server <span class="quiet">{one.base_url}</span></td>
                <td>
                  {one.status === "down" && one.error === "stopped" ? <Status value="stopped" /> : (
                    <><Status value={one.status} /> {one.error && <span class="quiet">{one.error}</span>}</>
                  )}
                </td>
                <td>{one.load ? `${one.load.num_running} running, ${one.load.num_waiting} waiting, ${Math.round(100 * one.load.token_usage)} % of memory` : "–"}</td>
                <td class="num">{number(one.policy_version)}</td>
                <td><Ago at={one.heartbeat_at} now={now} /></td>
              </tr>
            ))}
            {samplers.map((one) => (
              <tr key={one.id}>
                <td>sampler <span class="quiet">{one.id}</span></td>
                <td><Status value={one.status} /></td>
                <td>{number(one.num_running)} running, {number(one.num_finished)} finished, {number(one.num_output_tokens)} tokens</td>
                <td />
                <td><Ago at={one.heartbeat_at} now={now} /></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Section>
  );
}

/** Errors of the infrastructure, grouped by their text. */
export function ErrorsCard({ run, tick, may }: { run: string; tick: number; may: boolean }) {
  const { value, error } = useAsk<Errors>(ofRun(run, "errors"), tick);
  const [said, say] = useState("");
  if (error) return <Problem text={error} />;
  if (!value?.errors.length) return null;
  const retry = async () => {
    try {
      const found = await tell<{ num_added: number }>(ofRun(run, "retry"), {});
      const groups = found.num_added === 1 ? "1 group was" : `${found.num_added} groups were`;
      say(found.num_added ? `${groups} added for a retry.` : "All of them have already been added.");
    } catch (problem) {
      say((problem as Error).message);
    }
  };
  return (
    <Section
      title="Errors"
      aside={may && <button type="button" onClick={retry}>Retry failed questions</button>}
    >
      {said && <p role="status">{said}</p>}
      {value.errors.map((one) => (
        <details key={one.text} class="fold">
          <summary>
            <b>{one.num}</b> {Object.keys(one.statuses).join(", ")} · <span dir="ltr">{one.text}</span>
          </summary>
          <Block text={one.example} plain label="Example of the error" />
          <p>{one.records.map((id) => <Link key={id} class="tag" href={recordPath(run, id)}>{id}</Link>)}</p>
        </details>
      ))}
    </Section>
  );
}

function Config({ run }: { run: string }) {
  const [open, setOpen] = useState(false);
  const { value } = useAsk<object>(open ? ofRun(run, "config") : null);
  useEffect(() => setOpen(false), [run]);
  return (
    <details class="card" open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Configuration</summary>
      {value ? <Block text={JSON.stringify(value, null, 2)} label="Configuration" /> : <Loading />}
    </details>
  );
}
