// One rollout: the conversation, optionally token by token, and its use in training.

import { useEffect, useState } from "preact/hooks";
import { Link, useLocation, useSearch } from "wouter-preact";
import { ofRun, withKey, query, type RecordAnswer, type Seat, type Session, type Turn, useAsk, useNews, ask } from "../api";
import {
  Ago, Badge, between, Crumbs, diffPath, Facts, groupPath, Loading, number, Problem, recordPath, runPath,
  ScoreChip, seconds, Section, Status, stepPath, useTitle,
} from "../parts";
import { LongText, ModelText, visible } from "../texts";
import { ForkForm, ForksOf } from "./forks";
import { COLOURS, type Colouring, TokenLegend, Tokens } from "./tokens";

export function RecordPage({ run, session }: { run: string; session: Session | null }) {
  const given = new URLSearchParams(useSearch());
  const id = given.get("id") ?? "";
  const attempt = given.get("attempt");
  const colouring = (given.get("colour") ?? "none") as Colouring;
  const [, go] = useLocation();
  useTitle(id);
  const follow = given.get("follow") === "1";
  const { tick } = useNews(run, id);
  const { value, error } = useAsk<RecordAnswer>(ofRun(run, "record", { id, attempt }), tick);
  const [more, setMore] = useState<Turn[]>([]);
  const [next, setNext] = useState<number | null>(null);
  useEffect(() => {
    setMore([]);
    setNext(value?.next ?? null);
  }, [value]);
  const turns = [...(value?.turns ?? []), ...more];
  const wanted = given.get("turn");
  useEffect(() => {
    if (wanted !== null && value) document.getElementById(`turn-${wanted}`)?.scrollIntoView();
  }, [wanted, value === null]);
  const load = async () => {
    const page = await ask<RecordAnswer>(ofRun(run, "record", { id, attempt, start: next }));
    setMore([...more, ...page.turns]);
    setNext(page.next);
  };
  const isRunning = value?.record.status === "running";
  useEffect(() => {
    if (!follow || !isRunning || !turns.length) return;
    if (next !== null) void load();
    else document.getElementById(`turn-${turns[turns.length - 1]?.index}`)?.scrollIntoView({ block: "end" });
  }, [follow, isRunning, next, turns.length]);
  const [forked, setForked] = useState(0);
  const group = id.slice(0, id.lastIndexOf("/"));
  const task = value?.fork?.task_id ?? group;
  const crumbs = <Crumbs run={run} items={[["Groups", `${runPath(run)}/groups`], [task, groupPath(run, task)], [value?.fork ? `fork at turn ${value.fork.turn}` : `rollout ${id.slice(group.length + 1)}`, null]]} />;
  if (error && !value) return <>{crumbs}<Problem text={error} /></>;
  if (!value) return <>{crumbs}<Loading /></>;
  const { record } = value;
  const keep = (colour: string) =>
    go(recordPath(run, id, { ...(attempt ? { attempt } : {}), ...(colour === "none" ? {} : { colour }), ...(follow ? { follow: "1" } : {}) }), { replace: true });
  const nextColour = COLOURS[(COLOURS.findIndex(([name]) => name === colouring) + 1) % COLOURS.length]?.[0] ?? "none";
  const sibling = (by: number) => {
    const at = record.traj_id + by;
    return at < 0 || at >= value.task.num_generations ? null : recordPath(run, `${group}/${at}`, colouring === "none" ? {} : { colour: colouring });
  };
  return (
    <>
      {crumbs}
      <div class="head">
        <h1 class="clip">{id}</h1>
        <ScoreChip score={record.score?.value} />
        <Status value={record.status} />
        {record.outcome && <Badge kind="plain">{record.outcome.replace(/_/g, " ")}</Badge>}
        {value.fork && <Badge kind="warn">fork, excluded from training</Badge>}
        <span class="spring" />
        {sibling(-1) && <Link class="button" data-key="previous" href={sibling(-1) as string}>← rollout {record.traj_id - 1}</Link>}
        {sibling(1) && <Link class="button" data-key="next" href={sibling(1) as string}>rollout {record.traj_id + 1} →</Link>}
      </div>
      <div class="columns">
        <Section title="Result">
          <h3>Question</h3>
          <LongText run={run} text={value.task.query ?? null} plain label="Question" />
          <h3>Answer {record.score && <ScoreChip score={record.score.value} />}</h3>
          {record.final_answer ? <LongText run={run} text={record.final_answer} plain label="Answer" /> : <p class="quiet">None.</p>}
          <h3>Reference</h3>
          {value.task.answer ? <LongText run={run} text={value.task.answer} plain label="Reference" /> : <p class="quiet">None.</p>}
          {value.task.columns && <><h3>Columns of the question</h3><LongText run={run} text={value.task.columns} label="Columns of the question" /></>}
          {record.error && <><h3>Error</h3><LongText run={run} text={record.error} plain label="Error" /></>}
        </Section>
        <Section title="Facts">
          <Facts rows={[
            ...(value.fork ? [["fork of", <><Link href={recordPath(run, value.fork.record_id, { turn: String(value.fork.turn) })}>{value.fork.record_id}</Link> from turn {value.fork.turn}{value.fork.is_edited && ", with edited messages"} (<Link href={diffPath(run, value.fork.record_id, id)}>compare</Link>)</>] as [string, preact.ComponentChildren]] : []),
            ["training", value.fork ? "never: forks are excluded" : <Ledger run={run} value={value} />],
            ["policy versions", record.min_version === null ? "none" : `${record.min_version} to ${record.max_version}; the run is at ${value.policy_version}`],
            ["tokens", `${number(record.num_prompt_tokens)} input, ${number(record.num_output_tokens)} sampled`],
            ["turns, tool calls", `${value.num_turns}, ${record.num_tool_calls}`],
            ["duration", ((took) => took === null ? "–" : seconds(took))(between(record.started_at, record.finished_at))],
            ...(value.task_changed ? [["question", "edited after this rollout"] as [string, string]] : []),
          ]} />
          <h3>Attempts</h3>
          <ol class="plain">
            {record.attempts.map((one) => (
              <li key={one.fence}>
                <Link href={recordPath(run, id, { attempt: String(one.attempt) })}>attempt {one.attempt}</Link>{" "}
                {one.ended_by ? `ended: ${one.ended_by}` : "running"} <span class="quiet">{one.owner} <Ago at={one.started_at} /></span>
                {one.error && <LongText run={run} text={one.error} plain label="Error of the attempt" />}
              </li>
            ))}
          </ol>
          {!record.attempts.length && <p class="quiet">Not started yet.</p>}
        </Section>
        <Section title="Scores">
          {[record.score, ...record.more_scores].map((score) => score && (
            <div key={`${score.scorer} ${score.version}`}>
              <p><ScoreChip score={score.value} /> by <b>{score.scorer}</b>, version {score.version}, <Ago at={score.scored_at} /></p>
              {Object.keys(score.parts).length > 0 && <p class="quiet">{named(score.parts)}</p>}
              {score.detail.text && <LongText run={run} text={score.detail} plain label="Explanation of the judge" />}
              {score.inputs.text !== "{}" && <details class="fold"><summary>Inputs of the scorer</summary><LongText run={run} text={score.inputs} label="Inputs" /></details>}
            </div>
          ))}
          {!record.score && <p class="quiet">Not scored.</p>}
          {(record.reward !== null || Object.keys(record.metrics).length > 0) && (
            <>
              <h3>Reported by the agent</h3>
              <dl class="facts" aria-label="Reported by the agent">
                {record.reward !== null && <div><dt>reward</dt><dd>{number(record.reward)}</dd></div>}
                {Object.entries(record.metrics).map(([name, one]) => (
                  <div key={name}><dt dir="ltr">{visible(name)}</dt><dd>{number(one)}</dd></div>
                ))}
              </dl>
            </>
          )}
        </Section>
      </div>
      <ForksOf run={run} id={id} tick={tick + forked} />
      <Timeline turns={turns.filter((turn) => turn.index >= (value.fork?.turn ?? 0))} value={value} />
      <div class="row bar-row">
        <label class="field inline">
          <span>Color tokens by</span>
          <select value={colouring} onChange={(event) => keep(event.currentTarget.value)}>
            {COLOURS.map(([name, text]) => <option key={name} value={name}>{text}</option>)}
          </select>
        </label>
        <button type="button" class="hidden" data-key="colour" tabIndex={-1} onClick={() => keep(nextColour)}>Next color</button>
        <TokenLegend colouring={colouring} />
        {isRunning && (
          <label class="field inline">
            <input type="checkbox" checked={follow} onChange={(event) => go(recordPath(run, id, event.currentTarget.checked ? { follow: "1" } : {}), { replace: true })} />
            <span>Follow new turns</span>
          </label>
        )}
      </div>
      {turns.map((turn) => (
        <TurnCard
          key={turn.id} run={run} turn={turn} colouring={colouring} policy={value.policy_version}
          inherited={value.fork !== null && turn.index < value.fork.turn}
          fork={session?.may_control && turn.trainable && value.attempt === record.attempt ? () => setForked(forked + 1) : null}
          record={id}
        />
      ))}
      {!turns.length && <p class="quiet">Attempt {value.attempt} has no turns.</p>}
      {next !== null && <button type="button" onClick={load}>Show turns from {next} of {value.num_turns}</button>}
    </>
  );
}

/** Figures by name, on one line. */
function named(figures: Record<string, number>): string {
  return Object.entries(figures).map(([name, value]) => `${visible(name)} ${number(value)}`).join(", ");
}

function Ledger({ run, value }: { run: string; value: RecordAnswer }) {
  const entries = Object.entries(value.ledger);
  if (!entries.length) return <>not consumed yet</>;
  return (
    <>
      {entries.map(([name, entry]) => (
        <span key={name}>
          <Status value={entry.status} />{" "}
          {entry.trained_at.map((step) => <Link key={step} href={stepPath(run, step)}>trained at step {step}</Link>)}
          {!entry.trained_at.length && entry.step !== null && <Link href={stepPath(run, entry.step)}>step {entry.step}</Link>}
          {entry.reason && ` ${entry.reason.replace(/_/g, " ")}`}
        </span>
      ))}
    </>
  );
}

function SeatBadge({ seat }: { seat: Seat }) {
  const earned = seat.reward === null ? "" : `, earned ${number(seat.reward)}`;
  return (
    <Badge kind="plain">
      seat {visible(seat.name)}{seat.stint > 0 && `, stint ${seat.stint}`}{seat.trained ? earned : ", not trained"}
    </Badge>
  );
}

function TurnCard(props: {
  run: string; record: string; turn: Turn; colouring: Colouring; policy: number; inherited: boolean; fork: (() => void) | null;
}) {
  const { run, turn, colouring } = props;
  const [forking, setForking] = useState(false);
  const versions = [...new Set(turn.version_spans.map((span) => span.version))];
  const took = between(turn.started_at, turn.finished_at) ?? 0;
  return (
    <section class="turn card" id={`turn-${turn.index}`} aria-label={`Turn ${turn.index}`}>
      <div class="card-head">
        <h2><a href={query({ ...Object.fromEntries(new URLSearchParams(location.search)), turn: turn.index })} data-row>Turn {turn.index}</a></h2>
        <span class="quiet">
          {number(turn.num_added)} + {number(turn.num_output)} tokens · {seconds(took)}
          {versions.length > 0 && ` · version ${versions.join(", ")}`}
          {turn.mean_logprob !== null && ` · logprob ${number(turn.mean_logprob)}`} · {turn.finish_reason}
          {turn.cached_tokens > 0 && ` · ${number(turn.cached_tokens)} cached`}
        </span>
        {turn.seat && <SeatBadge seat={turn.seat} />}
        {turn.reward !== null && <Badge kind="plain">reward {number(turn.reward)}</Badge>}
        {turn.branch_reason && <Badge kind="warn">branches from turn {turn.parent ?? "none"}: {turn.branch_reason}</Badge>}
        {!turn.trainable && <Badge kind="plain">{turn.model || "another model"}, not trained</Badge>}
        {props.inherited && <Badge kind="plain">from the parent record</Badge>}
        <span class="spring" />
        {props.fork && (
          <button type="button" aria-expanded={forking} onClick={() => setForking(!forking)}>Fork here</button>
        )}
      </div>
      {forking && <ForkForm run={run} id={props.record} turn={turn.index} done={() => { setForking(false); props.fork?.(); }} />}
      {turn.tools.length > 0 && (
        <details class="fold">
          <summary>{turn.tools.length} tools: {turn.tools.map((tool) => tool.name).join(", ")}</summary>
          {turn.tools.map((tool) => (
            <div key={tool.name}>
              <h3>{tool.name}</h3>
              <LongText run={run} text={tool.description} plain label={`Description of ${tool.name}`} />
              <LongText run={run} turn={turn.id} text={tool.schema} label={`Schema of ${tool.name}`} />
            </div>
          ))}
        </details>
      )}
      {turn.messages.map((message, at) => (
        <Said key={at} who={message.role} folded={message.role === "system"} length={message.content.length}>
          <LongText run={run} turn={turn.id} text={message.content} label={`Message of ${message.role}`} />
          <Images run={run} addresses={message.images} />
          {message.rest && <LongText run={run} text={message.rest} label="Further fields" />}
        </Said>
      ))}
      <Said who="model">
        {colouring === "none" || !turn.num_output ? (
          <ModelText run={run} turn={turn.id} text={turn.output} />
        ) : (
          <Tokens run={run} turn={turn} colouring={colouring} />
        )}
      </Said>
      {turn.calls.map((call, at) => {
        const result = turn.results.find((one) => one.call_id === call.id);
        return (
          <div key={at} class="call">
            <Said who="call" name={call.name}>
              {call.format_error && <Problem text={`The call could not be read: ${call.format_error}`} />}
              <LongText run={run} turn={turn.id} text={call.arguments} label={`Arguments of ${call.name}`} />
            </Said>
            {result && <Result run={run} turn={turn} result={result} />}
          </div>
        );
      })}
      {turn.results.filter((one) => !turn.calls.some((call) => call.id === one.call_id)).map((one, at) => (
        <Result key={at} run={run} turn={turn} result={one} />
      ))}
      {turn.trainings.map((one) => (
        <p key={`${one.consumer} ${one.step}`} class="training">
          <Link href={stepPath(run, one.step)}>step {one.step}</Link>{" "}
          {number(one.num_trained_tokens)} of {number(one.num_tokens)} tokens trained, {one.staleness} versions behind
          {one.advantage !== null && <>, advantage <b>{number(one.advantage)}</b></>}
          {one.ratio && <>, ratio {number(one.ratio.mean)} ± {number(one.ratio.std)} ({number(one.ratio.min)} to {number(one.ratio.max)})</>}
          {one.num_clipped_tokens > 0 && `, ${one.num_clipped_tokens} clipped`}
          {Object.entries(one.masked).map(([why, count]) => `, ${count} masked: ${why.replace(/_/g, " ")}`)}
        </p>
      ))}
    </section>
  );
}

function Result({ run, turn, result }: { run: string; turn: Turn; result: Turn["results"][number] }) {
  return (
    <Said who={result.is_error ? "tool error" : "result"} name={result.name} aside={seconds(result.seconds)}>
      <LongText run={run} turn={turn.id} text={result.content} label={`Result of ${result.name}`} />
      <Images run={run} addresses={result.images} />
    </Said>
  );
}

function Said(props: { who: string; name?: string; aside?: string; folded?: boolean; length?: number; children: preact.ComponentChildren }) {
  const kind = props.who.replace(/[^a-z]/g, "-");
  if (props.folded) {
    return (
      <details class={`said said-${kind}`}>
        <summary>{props.who} <span class="quiet">{number(props.length)} characters</span></summary>
        {props.children}
      </details>
    );
  }
  return (
    <div class={`said said-${kind}`}>
      <p class="who">{props.who} {props.name && <b>{props.name}</b>} {props.aside && <span class="quiet">{props.aside}</span>}</p>
      {props.children}
    </div>
  );
}

const STORED = "sha256:";

function Images({ run, addresses }: { run: string; addresses: string[] }) {
  if (!addresses.length) return null;
  return (
    <p class="images">
      {addresses.map((address, at) =>
        address.startsWith(STORED) ? (
          <img key={at} loading="lazy" alt={`Image ${at + 1} of the message`} src={withKey(run, "image", { key: address.slice(STORED.length) })} />
        ) : (
          // Images at other addresses are not loaded; the address is shown.
          <code key={at} class="break">{address.slice(0, 200)}</code>
        ),
      )}
    </p>
  );
}

/** When the model, the tools and the scorer were active. */
function Timeline({ turns, value }: { turns: Turn[]; value: RecordAnswer }) {
  const first = turns[0];
  if (!first) return null;
  const start = Date.parse(first.started_at);
  const spans: { kind: string; from: number; to: number; text: string }[] = [];
  for (const turn of turns) {
    const from = (Date.parse(turn.started_at) - start) / 1000;
    const to = (Date.parse(turn.finished_at) - start) / 1000;
    spans.push({ kind: "model", from, to, text: `turn ${turn.index}: model ${seconds(to - from)}` });
    // The calls of one turn run concurrently.
    for (const result of turn.results) {
      spans.push({ kind: "tool", from: to, to: to + result.seconds, text: `turn ${turn.index}: ${result.name} ${seconds(result.seconds)}` });
    }
  }
  const ended = value.record.finished_at;
  const scored = between(ended, value.record.score?.scored_at ?? null);
  if (ended && scored !== null && scored >= 0) {
    const from = (Date.parse(ended) - start) / 1000;
    spans.push({ kind: "scorer", from, to: from + scored, text: `scorer ${seconds(scored)}` });
  }
  const end = Math.max(...spans.map((span) => span.to), 1e-3);
  const spent = (kind: string) => spans.filter((span) => span.kind === kind).reduce((sum, span) => sum + span.to - span.from, 0);
  const words = ["model", "tool", "scorer"].map((kind) => `${kind} ${seconds(spent(kind))}`).join(", ");
  return (
    <Section title="Time" aside={<span class="quiet">{words}</span>}>
      <div class="timeline" role="img" aria-label={`Time line: ${words}`}>
        {spans.map((span, at) => (
          <span
            key={at}
            class={`span-${span.kind}`}
            title={span.text}
            style={{ left: `${(100 * span.from) / end}%`, width: `max(2px, ${(100 * (span.to - span.from)) / end}%)` }}
          />
        ))}
      </div>
    </Section>
  );
}
