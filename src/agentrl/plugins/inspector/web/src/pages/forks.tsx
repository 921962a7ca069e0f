// The forks of a record or group, and the form that starts one.

import { useEffect, useState } from "preact/hooks";
import { Link } from "wouter-preact";
import { ask, type Fork, ofRun, type Shown, tell, useAsk, useNews } from "../api";
import { Ago, Field, Loading, Problem, recordPath, RunHead, ScoreChip, Section, Status } from "../parts";
import { visible } from "../texts";

const REFRESH_MS = 1000;
const ENDED = new Set(["scored", "failed", "finished"]);

/** The rollouts of forks, one per row. */
export function ForkTable({ run, forks }: { run: string; forks: Fork[] }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Forks">
      <table>
        <thead>
          <tr>
            <th scope="col">From</th><th scope="col">Differs by</th><th scope="col">Rollout</th>
            <th scope="col">Score</th><th scope="col">Outcome</th><th scope="col">Answer</th>
            <th scope="col">Created</th>
          </tr>
        </thead>
        <tbody>
          {forks.flatMap((fork) => fork.tries.map((one) => (
            <tr key={one.record_id}>
              <td><Link href={recordPath(run, fork.record_id, { turn: String(fork.turn) })}>rollout {fork.record_id.slice(fork.record_id.lastIndexOf("/") + 1)}, turn {fork.turn}</Link></td>
              <td>{difference(fork)}</td>
              <td><Link href={recordPath(run, one.record_id)} data-row>{one.traj_id}</Link></td>
              <td><ScoreChip score={one.score} /></td>
              <td>{one.outcome?.replace(/_/g, " ") ?? <Status value={one.status} />}{one.error && <span class="quiet"> {visible(one.error)}</span>}</td>
              <td>{one.answer === null ? "–" : visible(one.answer)}</td>
              <td><Ago at={fork.created_at} /></td>
            </tr>
          )))}
        </tbody>
      </table>
    </div>
  );
}

function difference(fork: Fork): string {
  const given = Object.entries(fork.sampling).map(([name, value]) => `${name} ${value}`);
  return [`version ${fork.version}`, ...(fork.is_edited ? ["edited messages"] : []), ...given].join(", ");
}

/** The forks of one record, refreshed while any of them is running. */
export function ForksOf({ run, id, tick }: { run: string; id: string; tick: number }) {
  const [round, next] = useState(0);
  const { value, error } = useAsk<{ forks: Fork[] }>(ofRun(run, "forks", { id }), tick + round);
  const running = value?.forks.some((fork) => fork.tries.some((one) => !ENDED.has(one.status))) ?? false;
  useEffect(() => {
    if (!running) return;
    const timer = window.setTimeout(() => next(round + 1), REFRESH_MS);
    return () => window.clearTimeout(timer);
  }, [running, value]);
  if (error) return <Problem text={error} />;
  if (!value?.forks.length) return null;
  return <Section title="Forks"><ForkTable run={run} forks={value.forks} /></Section>;
}

export function ForksPage({ run }: { run: string }) {
  const { tick } = useNews(run);
  const { value, error } = useAsk<{ forks: Fork[] }>(ofRun(run, "forks"), tick);
  return (
    <>
      <RunHead run={run} title="Forks" />
      <p class="quiet">Rollouts continued from a turn of another one; they are excluded from training.</p>
      {error && <Problem text={error} />}
      {!value && !error && <Loading />}
      {value && <Section title={`The newest ${value.forks.length}`}><ForkTable run={run} forks={value.forks} /></Section>}
    </>
  );
}

/** The form that continues from a turn; the messages shown to the turn can be edited. */
export function ForkForm(props: { run: string; id: string; turn: number; done: () => void }) {
  const { run, id, turn, done } = props;
  const [shown, setShown] = useState<Shown | null>(null);
  const [error, setError] = useState<string | null>(null);
  const [starting, setStarting] = useState(false);
  useEffect(() => {
    ask<Shown>(ofRun(run, "shown", { id, turn })).then(setShown, (problem: Error) => setError(problem.message));
  }, [run, id, turn]);
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    const given = new FormData(event.currentTarget as HTMLFormElement);
    const count = (name: string) => {
      const typed = String(given.get(name) ?? "").trim();
      return typed === "" ? {} : { [name]: Number(typed) };
    };
    const messages = (shown?.messages ?? []).map((one, at) =>
      typeof one.content === "string" ? { ...one, content: String(given.get(`message-${at}`) ?? "").replace(/\r\n/g, "\n") } : one,
    );
    const edited = messages.some((one, at) => one.content !== shown?.messages[at]?.content);
    setStarting(true);
    setError(null);
    try {
      await tell(ofRun(run, "fork"), {
        record: id, turn, ...count("tries"), ...count("temperature"), ...count("version"),
        ...(edited ? { messages } : {}),
      });
      done();
    } catch (problem) {
      setError((problem as Error).message);
    }
    setStarting(false);
  };
  return (
    <form class="fork" onSubmit={submit} aria-label={`Fork at turn ${turn}`}>
      <p class="quiet">
        Turns before {turn} are kept; turn {turn} and later turns are sampled again and excluded from training.
      </p>
      {shown?.messages.map((one, at) =>
        typeof one.content === "string" ? (
          <Field key={at} label={`${one.role} ${one.name ?? ""}`}>
            <textarea name={`message-${at}`} rows={Math.min(10, one.content.split("\n").length + 1)} dir="ltr">{one.content}</textarea>
          </Field>
        ) : (
          <p key={at} class="quiet">{one.role}: unchanged, with its images</p>
        ),
      )}
      <div class="row">
        <Field label="Rollouts"><input name="tries" type="number" min="1" max="32" defaultValue="1" /></Field>
        <Field label="Temperature"><input name="temperature" type="number" min="0" step="any" placeholder="unchanged" /></Field>
        <Field label="Version"><input name="version" type="number" min="0" placeholder="newest" /></Field>
        <button type="submit" disabled={starting || !shown}>{starting ? "Starting…" : "Continue from here"}</button>
      </div>
      {error && <Problem text={error} />}
    </form>
  );
}
