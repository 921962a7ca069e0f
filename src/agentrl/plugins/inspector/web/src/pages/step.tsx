// One optimizer step: its records, the records and tokens left out with the reasons, and the resulting weights.

import { useMemo, useState } from "preact/hooks";
import { Link, useSearch } from "wouter-preact";
import { ofRun, type StepAnswer, type StepRecord, useAsk } from "../api";
import {
  Bars, bytes, Crumbs, type Fact, Facts, groupPath, Loading, number, Problem, recordPath, runPath, ScoreChip,
  Section, Status, stepPath, useTitle,
} from "../parts";
import { explained, FigureHead, useWords } from "../words";

const FIGURES = [
  "reward_mean", "reward_std", "loss", "grad_norm", "learning_rate", "entropy", "kl", "ratio_mean",
  "ratio_max", "logprob_gap", "clip_fraction", "drop_fraction", "num_groups", "num_records",
  "num_trained_records", "num_trained_tokens", "num_output_tokens", "turns_mean", "branch_reuse", "credit_spread", "saved_groups", "tokens_per_second",
  "skipped",
];
const MERGING = ["merge_tokens", "merge_rollouts", "merge_attention", "merge_blocks", "merge_error", "num_forward_tokens", "num_flat_tokens"];

export function StepPage({ run, step }: { run: string; step: number }) {
  useTitle(`Step ${step}`);
  const { value, error } = useAsk<StepAnswer>(ofRun(run, "step", { step }));
  const trained = useSearch().includes("dropped") ? "dropped" : "all";
  const [shown, show] = useState(trained);
  const wordsOf = useWords("step");
  const records = useMemo(
    () => (value?.records ?? []).filter((one) => shown === "all" || (shown === "dropped") === (one.status === "dropped")),
    [value, shown],
  );
  const crumbs = <Crumbs run={run} items={[[`Step ${step}`, null]]} />;
  if (error) return <>{crumbs}<Problem text={error} /><p><Link href={runPath(run)}>The run</Link></p></>;
  if (!value) return <>{crumbs}<Loading /></>;
  const figures = value.figures ?? {};
  const pick = (names: string[]): Fact[] =>
    names.filter((name) => figures[name] !== undefined && figures[name] !== null).map((name) => {
      const words = wordsOf(name);
      const value = figures[name];
      const shown = typeof value === "number" ? <>{number(value, 4)} <span class="quiet">{words.unit}</span></> : String(value);
      return [words.name, shown, explained(words)];
    });
  const masked: Record<string, number> = {};
  for (const one of value.records) {
    for (const [why, count] of Object.entries(one.masked)) masked[why] = (masked[why] ?? 0) + count;
  }
  return (
    <>
      {crumbs}
      <div class="head">
        <h1>Step {step}</h1>
        <span class="quiet">computed by {value.consumer === "trainer" ? "the trainer" : value.consumer}</span>
        <span class="spring" />
        {step > 1 && <Link class="button" data-key="previous" href={stepPath(run, step - 1)}>← {step - 1}</Link>}
        {step < value.last && <Link class="button" data-key="next" href={stepPath(run, step + 1)}>{step + 1} →</Link>}
      </div>
      <div class="columns">
        <Section title="Figures">
          {value.figures ? <Facts rows={pick(FIGURES)} /> : <p class="quiet">The run has no figures for this step.</p>}
        </Section>
        <div>
        <Section title={wordsOf("seconds").name} hint={explained(wordsOf("seconds"))}><Bars counts={(figures["seconds"] as Record<string, number>) ?? {}} unit="s" /></Section>
        <Section title="Left out">
          <FigureHead of="dropped" />
          <Bars counts={(figures["dropped"] as Record<string, number>) ?? {}} />
          <FigureHead of="masked_tokens" />
          <Bars counts={(figures["masked_tokens"] as Record<string, number>) ?? masked} />
          <FigureHead of="staleness" />
          <Bars counts={(figures["staleness"] as Record<string, number>) ?? {}} />
          {figures["branched_records"] && Object.keys(figures["branched_records"]).length > 0 && (
            <>
              <FigureHead of="branched_records" />
              <Bars counts={figures["branched_records"] as Record<string, number>} />
            </>
          )}
        </Section>
        </div>
        <div>
        <Section title="Merging"><Facts rows={pick(MERGING)} /></Section>
        <Section title="Weights">
          {value.policy ? (
            <Facts rows={[
              ["version", number(value.policy.version)],
              ["directory", <span class="break">{value.policy.path}</span>],
              ["size", value.policy.num_bytes ? bytes(value.policy.num_bytes) : "not written yet"],
              ["SHA-256", <span class="break">{value.policy.checksum ?? "not computed"}</span>],
            ]} />
          ) : (
            <p class="quiet">Version {step} is not published, or no longer available.</p>
          )}
        </Section>
        </div>
      </div>
      <Section
        title={`Records (${records.length})`}
        aside={
          <select value={shown} onChange={(event) => show(event.currentTarget.value)} aria-label="Records to show">
            <option value="all">all</option>
            <option value="trained">trained</option>
            <option value="dropped">dropped</option>
          </select>
        }
      >
        <div class="scroll" tabIndex={0} role="region" aria-label="Records">
          <table>
            <thead>
              <tr>
                <th scope="col">Record</th><th scope="col">Use</th><th scope="col">Score</th>
                <th scope="col" class="num">Advantage</th><th scope="col" class="num">Ratio</th>
                <th scope="col" class="num">Tokens trained</th><th scope="col">Masked</th>
                <th scope="col" class="num">Versions</th><th scope="col">Outcome</th>
              </tr>
            </thead>
            <tbody>{records.map((one) => <Row key={one.record_id} run={run} one={one} />)}</tbody>
          </table>
        </div>
      </Section>
    </>
  );
}

function Row({ run, one }: { run: string; one: StepRecord }) {
  return (
    <tr>
      <td>
        <Link href={recordPath(run, one.record_id)} data-row>{one.record_id}</Link>{" "}
        <Link class="quiet" href={groupPath(run, one.task_id)}>group</Link>
      </td>
      <td><Status value={one.status} /> {one.reason && <span class="quiet">{one.reason.replace(/_/g, " ")}</span>}</td>
      <td><ScoreChip score={one.score} /></td>
      <td class="num">{number(one.advantage)}</td>
      <td class="num">{number(one.ratio)}</td>
      <td class="num">{number(one.num_trained_tokens)} of {number(one.num_tokens)}</td>
      <td>{Object.entries(one.masked).map(([why, count]) => `${why.replace(/_/g, " ")} ${count}`).join(", ")}</td>
      <td class="num">{one.min_version === null ? "–" : `${one.min_version}–${one.max_version}`}</td>
      <td>{one.outcome?.replace(/_/g, " ") ?? "–"}</td>
    </tr>
  );
}
