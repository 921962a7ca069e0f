// Two rollouts turn by turn, with their differences marked.

import { Link, useSearch } from "wouter-preact";
import { ofRun, type RecordAnswer, type Turn, useAsk } from "../api";
import { Crumbs, groupPath, Loading, Problem, recordPath, ScoreChip, Section, useTitle } from "../parts";
import { Difference } from "../texts";

export function DiffPage({ run }: { run: string }) {
  const given = new URLSearchParams(useSearch());
  const [a, b] = [given.get("a") ?? "", given.get("b") ?? ""];
  useTitle(`${a} and ${b}`);
  const one = useAsk<RecordAnswer>(a ? ofRun(run, "record", { id: a }) : null);
  const other = useAsk<RecordAnswer>(b ? ofRun(run, "record", { id: b }) : null);
  const task = one.value?.record.task_id;
  const error = one.error ?? other.error;
  const num = Math.max(one.value?.turns.length ?? 0, other.value?.turns.length ?? 0);
  return (
    <>
      <Crumbs run={run} items={[...(task ? [[task, groupPath(run, task)] as [string, string]] : []), ["Compare rollouts", null]]} />
      <h1>Two rollouts</h1>
      {error && <Problem text={error} />}
      {(!one.value || !other.value) && !error && <Loading />}
      {one.value && other.value && (
        <>
          <p>
            <del>from</del> <Link href={recordPath(run, a)}>{a}</Link> <ScoreChip score={one.value.record.score?.value} />{" "}
            <ins>to</ins> <Link href={recordPath(run, b)}>{b}</Link> <ScoreChip score={other.value.record.score?.value} />
          </p>
          {Array.from({ length: num }, (_, at) => (
            <Section key={at} title={`Turn ${at}`}>
              <Difference
                from={said(one.value?.turns[at])}
                to={said(other.value?.turns[at])}
                label={`Turn ${at}, differences`}
              />
            </Section>
          ))}
        </>
      )}
    </>
  );
}

function said(turn: Turn | undefined): string {
  if (!turn) return "";
  return [
    ...turn.messages.map((message) => `[${message.role}] ${message.content.text}`),
    `[model] ${turn.output.text}`,
    ...turn.results.map((result) => `[${result.is_error ? "tool error" : "tool"} ${result.name}] ${result.content.text}`),
  ].join("\n");
}
