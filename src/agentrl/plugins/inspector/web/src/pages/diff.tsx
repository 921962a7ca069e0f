// Two rollouts side by side, from the turn where they part.

import { useEffect, useState } from "preact/hooks";
import { Link, useSearch } from "wouter-preact";
import { ask, ofRun, type RecordAnswer, type Turn, useAsk } from "../api";
import {
  Badge, Crumbs, groupPath, Loading, number, Problem, recordPath, ScoreChip, Section, useTitle,
} from "../parts";
import { Difference, Side } from "../texts";

export function DiffPage({ run }: { run: string }) {
  const given = new URLSearchParams(useSearch());
  const [a, b] = [given.get("a") ?? "", given.get("b") ?? ""];
  useTitle(`${a} and ${b}`);
  const one = useWholeRecord(run, a);
  const other = useWholeRecord(run, b);
  const task = one.value?.record.task_id;
  const error = one.error ?? other.error;
  return (
    <>
      <Crumbs run={run} items={[...(task ? [[task, groupPath(run, task)] as [string, string]] : []), ["Compare rollouts", null]]} />
      <div class="head"><h1>Two rollouts</h1></div>
      {error && <Problem text={error} />}
      {(!one.value || !other.value) && !error && <Loading />}
      {one.value && other.value && <SideBySide run={run} one={one.value} other={other.value} />}
    </>
  );
}

/** A record with all of its turns. */
function useWholeRecord(run: string, id: string): { value: RecordAnswer | null; error: string | null } {
  const { value, error } = useAsk<RecordAnswer>(id ? ofRun(run, "record", { id }) : null);
  const [whole, setWhole] = useState<RecordAnswer | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  useEffect(() => {
    setWhole(null);
    if (!value) return;
    const read = async () => {
      const turns = [...value.turns];
      for (let next = value.next; next !== null;) {
        const page = await ask<RecordAnswer>(ofRun(run, "record", { id, start: next }));
        turns.push(...page.turns);
        next = page.next;
      }
      setWhole({ ...value, turns });
    };
    read().catch((failed: Error) => setProblem(failed.message));
  }, [value]);
  return { value: whole, error: error ?? problem };
}

function SideBySide({ run, one, other }: { run: string; one: RecordAnswer; other: RecordAnswer }) {
  const num = Math.max(one.turns.length, other.turns.length);
  const texts = Array.from({ length: num }, (_, at) => [said(one.turns[at]), said(other.turns[at])] as const);
  const parting = texts.findIndex(([left, right]) => left !== right);
  const first = parting < 0 ? num : parting;
  return (
    <>
      <div class="sides">
        {[one, other].map((answer, at) => <Head key={at} run={run} answer={answer} />)}
      </div>
      {first > 0 && (
        <details class="card fold">
          <summary>{first === 1 ? "Turn 0 is" : `Turns 0 to ${first - 1} are`} the same in both</summary>
          {texts.slice(0, first).map(([text], at) => (
            <Difference key={at} from={text} to={text} label={`Turn ${at}, in both`} />
          ))}
        </details>
      )}
      {parting < 0 && <p role="status">The two rollouts say the same.</p>}
      {texts.slice(first).map(([left, right], index) => {
        const at = first + index;
        return (
          <Section key={at} title={`Turn ${at}`} aside={index === 0 && <Badge kind="warn">they part here</Badge>}>
            <div class="sides">
              <TurnSide turn={one.turns[at]} label={`Turn ${at}, first rollout`} from={left} to={right} side="from" />
              <TurnSide turn={other.turns[at]} label={`Turn ${at}, second rollout`} from={left} to={right} side="to" />
            </div>
          </Section>
        );
      })}
    </>
  );
}

function Head({ run, answer }: { run: string; answer: RecordAnswer }) {
  const { record } = answer;
  const advantage = answer.turns.flatMap((turn) => turn.trainings.map((one) => one.advantage)).find((one) => one !== null);
  const seen = record.min_version === null ? "–" : `${record.min_version} to ${record.max_version}`;
  return (
    <div class="card">
      <p><Link href={recordPath(run, record.id)}>{record.id}</Link> <ScoreChip score={record.score?.value} /> {record.outcome?.replace(/_/g, " ")}</p>
      <p class="quiet">
        advantage {number(advantage)} · {answer.num_turns} turns · {number(record.num_output_tokens)} tokens sampled ·
        {" "}{record.num_tool_calls} tool calls · versions {seen}
      </p>
      {record.final_answer && <p>Answer: <b dir="ltr">{record.final_answer.text.slice(0, 200)}</b></p>}
    </div>
  );
}

function TurnSide(props: { turn: Turn | undefined; label: string; from: string; to: string; side: "from" | "to" }) {
  const { turn } = props;
  if (!turn) return <p class="quiet">This rollout had ended.</p>;
  return (
    <div>
      <p class="quiet">
        {number(turn.num_output)} tokens{turn.mean_logprob !== null && `, mean logprob ${number(turn.mean_logprob)}`}
      </p>
      <Side from={props.from} to={props.to} side={props.side} label={props.label} />
    </div>
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
