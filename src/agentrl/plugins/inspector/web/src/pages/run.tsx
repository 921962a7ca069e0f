// One run: curves, time per phase of its steps, processes, alarms, errors and controls.

import { useEffect, useMemo, useState } from "preact/hooks";
import { Link, useLocation } from "wouter-preact";
import { type Curves, type Errors, ofRun, type Overview, type Session, tell, useAsk, useNews } from "../api";
import { Curve, StepBar } from "../charts";
import {
  Ago, Badge, Bars, Crumbs, type Fact, Facts, Loading, number, Problem, recordPath, runPath, Section, Status,
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
  if (overview.error && !view) return <><Crumbs run={run} /><Problem text={overview.error} /></>;
  if (!view) return <Loading />;
  const sum = (name: keyof Curves["spreads"]) => total(steps?.spreads[name] ?? []);
  return (
    <>
      <Crumbs run={run} />
      <div class="head">
        <h1>{run}</h1>
        <Status value={view.status} />
        {live && view.is_live && <Badge kind="live">live</Badge>}
        {view.control.sampling_paused && <Badge kind="warn">sampling paused</Badge>}
        <span class="spring" />
        <Link class="button" href={`${runPath(run)}/groups`}>Groups</Link>
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
      {session?.tour && <TourCard run={run} tour={session.tour} />}
      <Section title="Steps">
        {steps && steps.step.length > 0 ? (
          <StepBar
            steps={steps.step}
            phases={steps.spreads.seconds}
            href={(step) => stepPath(run, step)}
            go={(step) => go(stepPath(run, step))}
          />
        ) : (
          <p class="quiet">{curves.error ?? "No step has finished yet, or the run has no figures."}</p>
        )}
      </Section>
      {steps && <Charts run={run} curves={steps} />}
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
          <Bars counts={view.progress.records} />
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

function total(steps: Record<string, number>[]): Record<string, number> {
  const found: Record<string, number> = {};
  for (const step of steps) {
    for (const [name, count] of Object.entries(step ?? {})) found[name] = (found[name] ?? 0) + count;
  }
  return found;
}

function Charts({ run, curves }: { run: string; curves: Curves }) {
  const [, go] = useLocation();
  const wordsOf = useWords("step");
  const evalWords = useWords("eval")("reward_mean");
  const charts = useMemo(
    () =>
      SHOWN.filter((name) => curves.curves[name]).map((name) => ({
        words: wordsOf(name),
        lines: [{ label: wordsOf(name).name, x: curves.step, y: curves.curves[name] ?? [] }],
      })),
    [curves],
  );
  const evals = useMemo(
    () => [{
      label: evalWords.name,
      x: curves.evals.map((one) => one.version),
      y: curves.evals.map((one) => one.reward_mean),
    }],
    [curves],
  );
  if (!charts.length) return null;
  return (
    <Section title="Curves" aside={<span class="quiet">a click opens the step</span>}>
      <div class="curves">
        {charts.map((chart) => (
          <Curve key={chart.words.name} {...chart} onStep={(step) => go(stepPath(run, step))} />
        ))}
        {curves.evals.length > 0 && <Curve words={evalWords} lines={evals} />}
      </div>
    </Section>
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
                <td>{lease.expires_at > now ? <Status value="training" /> : <Badge kind="plain">lease expired</Badge>}</td>
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

function ErrorsCard({ run, tick, may }: { run: string; tick: number; may: boolean }) {
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
